"""What a signal does to a run: it ends it, or asks it to end where it can go on."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import os, signal, sys, time
    from hybridrl.system import signals
    kill = lambda number: os.kill(os.getpid(), number)
    signals.install()
    number = getattr(signal, sys.argv[1])
    try:
        with signals.graceful_stop():
            assert not signals.stop_requested()
            kill(number)
            kill(number)  # the same one, at once: Slurm sends it to steps and script
            assert signals.stop_requested()
            assert signals.time_is_up() == (number == signal.SIGUSR1)
            if sys.argv[2] == "patient":
                signals.begin_stop()
            signals._requested_at -= 2  # seconds
            kill(number)
            print("went on")
            time.sleep(0.1)
    except KeyboardInterrupt:
        print("interrupted")
    print(signals.exit_code())
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize(
    ("mode", "printed"), [("impatient", "interrupted"), ("patient", "went on")]
)
def test_the_first_one_asks_and_the_second_one_ends(name: str, mode: str, printed: str) -> None:
    """Unless the run is ending already, as it was asked to."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), name, mode],
        capture_output=True, text=True, check=False, env=os.environ,
    )  # fmt: skip
    code = 128 + getattr(signal, name)
    assert (done.stdout, done.stderr) == (f"{printed}\n{code}\n", "")


def test_one_that_comes_within_a_callback_is_not_lost() -> None:
    """Python drops what a callback raises, as one of its own does while it imports."""
    program = """
        import os, signal, time
        from hybridrl.system import signals
        class Dropped:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
        signals.install()
        try:
            Dropped()
            print("went on")
            time.sleep(20)
        except KeyboardInterrupt:
            print("interrupted", signals.exit_code())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, check=False, env=os.environ,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("went on\ninterrupted 143\n", "")
