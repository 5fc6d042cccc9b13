"""SkyRL 0.4.0's Tinker server; run by SkyRL's own Python, with the options of `skyrl.tinker.api`.

`python -m skyrl.tinker.api` starts its engine by `uv run`, which needs a checkout of SkyRL. Here
this Python starts it, in which the released package is installed.
"""

import argparse
import sys

import uvicorn
from skyrl.tinker import api
from skyrl.tinker.config import EngineConfig, add_model, config_to_argv


def engine_command(_: list[str], config: EngineConfig) -> list[str]:
    """The command of the engine's process."""
    return [sys.executable, "-m", "skyrl.tinker.engine", *config_to_argv(config)]


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model(parser, EngineConfig)
    parser.add_argument("--port", type=int, required=True)
    args = vars(parser.parse_args())
    port = args.pop("port")
    api.app.state.engine_config = EngineConfig.model_validate(args)
    api._build_uv_run_cmd_engine = engine_command  # there is no setting for it
    uvicorn.run(
        api.app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=5
    )


if __name__ == "__main__":
    main()
