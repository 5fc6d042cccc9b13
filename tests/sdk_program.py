"""A client of `hybridrl serve` as a process: `python sdk_program.py NAME`, of `PROGRAMS`.

It needs Tinker's SDK alone, so that the server may be in another environment. The server's address
and key are environment variables, as the server prints them. The last line is what it ends with.
"""

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import tinker

types: Any = tinker.types
TOKENS = [5, 6, 7, 8, 9, 10, 11]
SECONDS = 240
"""An answer takes less, or the program ends with an error."""


def settled(value: Any) -> Any:
    """What a method returns, or what the future that it returns becomes."""
    return value.result() if hasattr(value, "result") else value


def new_model(**settings: Any) -> tuple[Any, Any]:
    """A client of the only base model that there is, and a new model of its own."""
    service = tinker.ServiceClient()
    (served,) = service.get_server_capabilities().supported_models
    created = service.create_lora_training_client(base_model=served.model_name, **settings)
    return service, settled(created)


def datum(tokens: list[int], scored_from: int = 1) -> Any:
    """Cross entropy of all tokens from a place on."""
    weights = [float(place >= scored_from) for place in range(1, len(tokens))]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def loop() -> dict[str, Any]:
    """Sample, train on the samples, step, save, sample again: tokens, and all numbers besides."""
    service, training = new_model(rank=4, seed=3)
    params = types.SamplingParams(max_tokens=10)
    prompt = types.ModelInput.from_ints(TOKENS[:3])
    tokens, numbers = list[list[int]](), list[float]()
    for _ in range(2):
        sampler = settled(training.save_weights_and_get_sampling_client())
        answer = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result(SECONDS)
        data, drawn = [], list[list[float]]()
        for sample in answer.sequences:
            tokens.append(list(sample.tokens))
            drawn.append(list(sample.logprobs))
            data.append(datum([*TOKENS[:3], *sample.tokens], scored_from=3))
        numbers += [x for one in (answer.prompt_logprobs[1:], *drawn) for x in one]
        gradient = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        for own, sample in zip(gradient.result(SECONDS).loss_fn_outputs, drawn, strict=True):
            trained = own["logprobs"].tolist()[2:]
            assert all(abs(a - b) < 1e-5 for a, b in zip(trained, sample, strict=True))
        assert stepped.result(SECONDS) is not None
        numbers.append(gradient.result(SECONDS).metrics["loss:sum"])
    saved = training.save_weights_for_sampler("last").result(SECONDS).path
    state = training.save_state("last").result(SECONDS).path
    again = settled(service.create_sampling_client(model_path=saved))
    (sample,) = again.sample(prompt, 1, params).result(SECONDS).sequences
    tokens.append(list(sample.tokens))
    numbers += sample.logprobs
    numbers += again.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result(SECONDS)[1:]
    other = settled(service.create_training_client_from_state_with_optimizer(state))
    for model in (training, other):
        outputs = model.forward([datum(TOKENS)], "cross_entropy").result(SECONDS)
        numbers.append(outputs.metrics["loss:sum"])
    service.close("success")
    return {"tokens": tokens, "numbers": numbers}


def endless() -> None:
    """Ask for far more than is done soon, tell the model's name, and wait."""
    _, training = new_model(rank=4, seed=1)
    sampler = settled(training.save_weights_and_get_sampling_client())
    params, prompt = types.SamplingParams(max_tokens=32), types.ModelInput.from_ints(TOKENS[:3])
    asked: list[Any] = [sampler.sample(prompt, 16, params) for _ in range(50)]
    for _ in range(50):
        asked.append(training.forward_backward([datum(TOKENS)] * 16, "cross_entropy"))
        asked.append(training.optim_step(types.AdamParams(learning_rate=1e-2)))
    asked[0].result(SECONDS)  # so it is in the middle of the rest
    print(training.model_id, flush=True)
    for one in asked:
        one.result(SECONDS)


def steps() -> None:
    """Tell the model's name, then train and sample until the process ends, with a line a step."""
    _, training = new_model(rank=4, seed=2)
    print(training.model_id, flush=True)
    prompt = types.ModelInput.from_ints(TOKENS[:3])
    for number in itertools.count():
        training.forward_backward([datum(TOKENS)], "cross_entropy").result(SECONDS)
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result(SECONDS)
        sampler = settled(training.save_weights_and_get_sampling_client())
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result(SECONDS)
        print(number, flush=True)


PROGRAMS: dict[str, Callable[[], dict[str, Any] | None]] = {
    "loop": loop,
    "endless": endless,
    "steps": steps,
}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]]()), flush=True)
