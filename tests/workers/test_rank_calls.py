"""What the driver calls are methods of the workers, each spread as it is marked."""

import ast
import pickle
from pathlib import Path
from unittest import mock

import pytest

from hybridrl import serving
from hybridrl.driver import worker_group
from hybridrl.flow.sample import SampleId
from hybridrl.workers.actor_shards import ActorShards
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.base_worker import BaseWorker
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.dispatch import dispatched_methods, runs_concurrently
from hybridrl.workers.rank_calls import RankCalls, SharedIds
from hybridrl.workers.rollout_worker import RolloutWorker
from hybridrl.workers.sample_worker import SampleWorker
from hybridrl.workers.serving import ServingWorker
from hybridrl.workers.trainer_worker import TrainerWorker
from hybridrl.workers.worker_factory import ClusterWorker

KINDS = (BaseWorker, ActorShards, SampleWorker, ActorWorker, CriticWorker, TrainerWorker)
KINDS += (ServingWorker,)
WORKERS = {worker.__name__: worker for worker in KINDS}


def called() -> set[tuple[str, str]]:
    """Class and name of every worker's method that the driver's group or a server names."""
    files = [Path(worker_group.__file__), *Path(serving.__file__).parent.glob("*.py")]
    return {
        (node.value.id, node.attr)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in WORKERS
    }


def test_the_driver_calls_every_marked_method_and_no_other() -> None:
    """A group has the marks of all workers, whichever worker a rank is."""
    assert {name for _, name in called()} == dispatched_methods(ClusterWorker).keys()
    assert all(name in dispatched_methods(WORKERS[worker]) for worker, name in called())


def test_ranks_that_train_or_generate_alone_spread_what_they_share_alike() -> None:
    every = dispatched_methods(ClusterWorker)
    for worker in (RolloutWorker, TrainerWorker):
        assert dispatched_methods(worker).items() <= every.items()
        for name in dispatched_methods(worker):
            assert runs_concurrently(worker, name) == runs_concurrently(ClusterWorker, name)


def test_both_workers_spread_what_they_share_alike() -> None:
    actor, critic = dispatched_methods(ActorWorker), dispatched_methods(CriticWorker)
    assert critic.items() <= actor.items()
    assert dispatched_methods(BaseWorker).items() <= critic.items()
    for name in critic:
        assert runs_concurrently(ActorWorker, name) == runs_concurrently(CriticWorker, name)


def test_calls_reach_the_group_s_method_of_that_name() -> None:
    group = mock.Mock()
    calls, ids = RankCalls(group), (SampleId(0),)
    assert calls.same(ActorWorker.texts, ids) is group.texts.return_value
    group.texts.assert_called_once_with(ids)
    saved = calls.per_rank(ActorWorker.save_pending, ["path"], [()])
    assert saved is group.save_pending.return_value
    group.save_pending.assert_called_once_with(["path"], [()])


def test_a_method_is_called_as_it_is_marked() -> None:
    calls = RankCalls(mock.Mock())
    with pytest.raises(AssertionError, match="save_pending is called per rank"):
        calls.same(ActorWorker.save_pending, "path", ())
    with pytest.raises(AssertionError, match="texts is called alike"):
        calls.per_rank(ActorWorker.texts, [], [])


def test_shared_ids_arrive_as_a_plain_tuple_and_are_pickled_once() -> None:
    ids = SharedIds(SampleId(prompt, k=k) for prompt in range(3) for k in range(2))
    with mock.patch.object(SampleId, "__getnewargs__", autospec=True) as pickled:
        pickled.side_effect = lambda id: tuple(id)
        arrived = [pickle.loads(pickle.dumps(ids)) for _ in range(3)]
    assert pickled.call_count == len(ids)
    assert arrived == [tuple(ids)] * 3
    assert type(arrived[0]) is tuple
    assert type(arrived[0][0]) is SampleId
