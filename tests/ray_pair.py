"""An actor on each of two Ray nodes of this machine, whose object stores are apart."""

import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def pair_of(kind: type) -> Iterator[tuple[Any, Any, str, str]]:
    """Two actors of a test's class, which tells its `node`; the first is on the driver's node.

    Gives them and the ids of their nodes.
    """
    import ray
    from ray import cloudpickle

    module = sys.modules[kind.__module__]
    cluster = pkgutil.resolve_name("ray.cluster_utils:Cluster")(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "resources": {"a": 1}, "object_store_memory": 10**8},
    )
    try:
        cluster.add_node(num_cpus=1, resources={"b": 1}, object_store_memory=10**8)
        ray.init(address=cluster.address, log_to_driver=False)
        cloudpickle.register_pickle_by_value(module)
        make: Any = ray.remote(kind)
        sender, receiver = (make.options(resources={name: 1}).remote() for name in "ab")
        here, there = ray.get([sender.node.remote(), receiver.node.remote()])
        assert here != there
        yield sender, receiver, here, there
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        ray.shutdown()
        cluster.shutdown()
