"""`hybridrl watch`: the live page and the samples in a real browser, and who may ask for them."""

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as parquet
import pytest
from starlette.testclient import TestClient
from watched import served

from hybridrl import cli
from hybridrl.config import ConfigError
from hybridrl.telemetry import sample_files, watch, watched_run
from hybridrl.telemetry.records import JsonLines
from hybridrl.telemetry.sample_search import SampleList, SamplePosition, SampleQuery, SampleSearch
from hybridrl.telemetry.watch import listen
from hybridrl.telemetry.watch_app import make_app
from hybridrl.telemetry.watched_run import WatchedRun

TOKEN = "open-sesame"


def client(run_dir: Path, token: str | None = None) -> TestClient:
    app = make_app(WatchedRun(run_dir), token, ["testserver"])
    return TestClient(app, follow_redirects=False)


@pytest.fixture(scope="module")
def address(sampled_run: Path) -> Iterator[str]:
    with served(sampled_run) as address:
        yield address


def rows(page: Any) -> list[str]:
    """The ids of the samples that are listed."""
    page.wait_for_selector("#samples[aria-busy=false]", state="attached")
    return page.locator("#samples article").evaluate_all("rows => rows.map(r => r.dataset.key)")


def choose(page: Any, **filters: str) -> list[str]:
    """The samples that are listed with these filters, and no others."""
    page.locator("#filters button[type=reset]").click()
    for name, value in filters.items():
        setting = page.locator(f"#filters [name={name}]")
        if setting.evaluate("s => s.tagName") == "SELECT":
            setting.select_option(value)
        else:
            setting.fill(value)
    return rows(page)


# The page


@pytest.mark.browser
def test_steps_of_a_running_run_appear_without_a_reload(
    viewer: Any, new_sampled_run: Any, tmp_path: Path
) -> None:
    with new_sampled_run(tmp_path / "run") as run:
        run.step(1)
        with served(tmp_path / "run") as address:
            page = viewer.open(address)
            page.evaluate("window.kept = true")
            curve = page.locator('[data-chart="reward"] path.raw')
            assert curve.get_attribute("data-points") == "1"
            assert page.locator("#state").inner_text() == "running"
            assert len(rows(page)) == 6
            page.locator("#config, #events").first.locator("summary").click()
            run.step(2)
            page.wait_for_selector('[data-chart="reward"] path.raw[data-points="2"]')
            page.wait_for_selector('#samples article[data-step="2"]')
            assert len(rows(page)) == 12
            labels = page.locator("#timeline .choices button").all_inner_texts()
            assert labels == ["step 2", "step 1"]
            assert page.locator("#timeline svg").get_attribute("data-step") == "2"
            run.telemetry.__exit__(None, None, None)
            page.wait_for_selector('#state:has-text("finished")')
            assert page.evaluate("window.kept")
            assert page.locator("#events").get_attribute("open") is not None
            page.close()
    assert viewer.errors == []


@pytest.mark.browser
def test_a_reader_is_not_disturbed(viewer: Any, new_sampled_run: Any, tmp_path: Path) -> None:
    """A sample that is open, a filter and a chosen timeline stay when a new step comes."""
    with new_sampled_run(tmp_path / "run") as run:
        run.step(1)
        run.step(2)
        with served(tmp_path / "run") as address:
            page = viewer.open(address)
            page.locator("#timeline button", has_text="step 1").click()
            assert choose(page, step="2") == ["8.0", "8.1", "9.0", "9.1", "10.0", "10.1"]
            page.locator('[data-key="9.0"] .row').click()
            page.wait_for_selector(".tokens")
            run.step(3)
            page.wait_for_selector('[data-chart="reward"] path.raw[data-points="3"]')
            assert page.locator('[data-key="9.0"] .tokens').count() == 1
            assert len(rows(page)) == 6
            assert page.locator("#timeline svg").get_attribute("data-step") == "1"
            page.close()
    assert viewer.errors == []


@pytest.mark.browser
def test_a_server_that_is_gone_is_told(viewer: Any, sampled_run: Path) -> None:
    with served(sampled_run) as address:
        page = viewer.open(address)
        assert page.locator("#gone").is_hidden()
    page.wait_for_selector("#gone:not([hidden])")
    assert page.locator('[data-chart="reward"]').count() == 1
    assert all("ERR_" in error for error in viewer.errors)


@pytest.mark.browser
def test_a_finished_run_and_a_copy_of_it_look_alike(
    viewer: Any, run_dir: Path, tmp_path: Path
) -> None:
    """A copy is shown of a run whose process is on another host, and runs there."""
    copy = tmp_path / run_dir.name
    shutil.copytree(run_dir, copy)
    shown = []
    for folder in (run_dir, copy):
        with served(folder) as address:
            page = viewer.open(address)
            charts = page.locator("[data-chart]").evaluate_all("cs => cs.map(c => c.dataset.chart)")
            last = page.locator(".last").evaluate_all("ls => ls.map(l => l.dataset.value)")
            shown.append((charts, last, rows(page), page.locator("h1").inner_text()))
            assert page.locator("#state").inner_text() == "finished"
            page.close()
    assert shown[0] == shown[1]
    assert len(shown[0][0]) > 12
    text = (copy / "run.json").read_text().replace('"finished"', '"running"')
    (copy / "run.json").write_text(re.sub('"host": "[^"]*"', '"host": "elsewhere"', text))
    with served(copy) as address:
        page = viewer.open(address)
        assert page.locator("#state").inner_text() == "running"
        page.close()
    assert viewer.errors == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 1200])
def test_it_fits_small_screens_and_dark_ones(viewer: Any, address: str, width: int) -> None:
    page = viewer.open(address, width=width, dark=True)
    page.locator('[data-key="14.1"] .row').click()
    page.wait_for_selector(".tokens")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    color = page.evaluate("getComputedStyle(document.querySelector('.filters input')).color")
    assert min(map(int, re.findall(r"\d+", color)[:3])) > 200
    assert viewer.errors == []


# Samples


@pytest.mark.browser
def test_filters_list_what_they_say(viewer: Any, address: str) -> None:
    page = viewer.open(address)
    assert len(rows(page)) == 19
    assert choose(page, step="1", min_reward="1") == ["3.0", "4.0", "5.0"]
    assert choose(page, step="2", max_reward="0") == ["8.1", "9.1", "10.1"]
    assert choose(page, step="3", min_tokens="5", max_tokens="5") == ["13.1", "14.0"]
    assert choose(page, text="PROMPT 13") == ["13.0", "13.1"]
    assert choose(page, kind="source/words", step="2") == ["9.0", "9.1"]
    assert choose(page, kind="task/long", step="3") == ["13.0", "13.1", "15.0", "15.1"]
    assert choose(page, status="dropped", step="1") == ["5.0", "5.1"]
    assert choose(page, status="cut", step="1") == ["3.0"]
    assert choose(page, phase="evaluation") == ["evaluation main 0.0"]
    assert choose(page, text="no such words") == []
    assert page.locator("#note").inner_text() == "None."
    assert len(choose(page)) == 19
    assert viewer.errors == []


@pytest.mark.browser
def test_pages_of_samples_follow_each_other(viewer: Any, run_dir: Path) -> None:
    """A run without Parquet files has those of samples.jsonl, eight a step."""
    with served(run_dir) as address:
        page = viewer.open(address)
        assert len(rows(page)) == 50
        page.locator("#more").click()
        page.wait_for_selector("#samples article:nth-of-type(100)")
        listed = rows(page)
        assert len(set(listed)) == 100
        steps = page.locator("#samples article").evaluate_all("rs => rs.map(r => +r.dataset.step)")
        assert steps == sorted(steps, reverse=True)
        page.close()
    assert viewer.errors == []


@pytest.mark.browser
def test_a_long_search_goes_on_by_itself(
    viewer: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gives up after each step."""
    page_of = SampleSearch.page

    def one_step(self: SampleSearch, query: SampleQuery, begin: Any = None) -> SampleList:
        step = begin.step if begin else 3
        there = page_of(self, replace(query, step=step))
        return SampleList(there.rows, SamplePosition(step - 1) if step > 1 else None)

    monkeypatch.setattr(SampleSearch, "page", one_step)
    page = viewer.open(address)
    assert len(rows(page)) == 19
    assert choose(page, text="prompt 3") == ["3.0", "3.1"]
    assert page.locator("#note").inner_text() == ""
    assert viewer.errors == []


def token_colors(page: Any, kind: str) -> list[str]:
    page.locator(".detail .choices button", has_text=kind).click()
    assert page.locator(".tokens").get_attribute("data-coloring") == kind
    # Not `color-mix(...)` as it was set: what is drawn.
    colors = page.locator(".tokens span").evaluate_all(
        "ts => ts.map(t => getComputedStyle(t).backgroundColor)"
    )
    assert len(colors) == page.locator(".tokens span").count()
    return colors


def alpha(color: str) -> float:
    """How much of a color is drawn: `rgba(0, 0, 0, 0)` or `color(srgb r g b / a)`."""
    numbers = [float(x) for x in re.findall(r"[\d.]+(?:e-?\d+)?", color.removeprefix("color(srgb"))]
    return numbers[3] if len(numbers) > 3 else 1.0


@pytest.mark.browser
def test_tokens_are_colored_by_what_is_known_of_them(viewer: Any, address: str) -> None:
    page = viewer.open(address)
    choose(page, step="1")
    page.locator('[data-key="4.1"] .row').click()  # tokens 0 and 1 of version -1, then 0
    page.wait_for_selector(".tokens")
    facts = page.locator(".detail .facts").inner_text()
    assert "reward status ok" in facts
    assert "task short" in facts
    names = page.locator(".detail .choices button").all_inner_texts()
    assert names == [
        "log-probability", "reference log probs", "advantage", "mask", "policy version",
    ]  # fmt: skip
    shares = [alpha(color) for color in token_colors(page, "log-probability")]
    assert shares == sorted(shares)
    # -0.05 * 3**i of at most 5 nats, times 0.75, in whole percent.
    assert shares[:3] == pytest.approx([0.01, 0.02, 0.07], abs=0.006)
    assert [alpha(c) for c in token_colors(page, "reference log probs")] == shares[::-1]
    assert len(set(token_colors(page, "advantage"))) == 1  # one for the whole response
    mask = token_colors(page, "mask")
    assert mask[0] == mask[1] != mask[2] == mask[3]
    versions = token_colors(page, "policy version")
    assert versions[0] == versions[1] != versions[2] == versions[3]
    legend = page.locator(".detail .bar .legend").inner_text()
    assert "no policy" in legend
    assert "version 0" in legend
    page.locator('.tokens span[data-token="2"]').hover()
    tip = page.locator(".detail .tip").inner_text()
    assert tip.split("\n")[0] == '2: " three"'
    assert "log-probability -0.450" in tip
    assert "mask not trained" in tip
    assert "policy version version 0" in tip
    assert viewer.errors == []


@pytest.mark.browser
def test_replies_are_shaded_among_tokens(viewer: Any, new_sampled_run: Any, tmp_path: Path) -> None:
    """A turn of one token, a reply of one, and a turn of the others."""
    with new_sampled_run(tmp_path / "run") as run:
        run.step(1)
    columns = parquet.read_table(sample_files.path_of(run.run_dir, 1, 0)).to_pydict()
    number = next(i for i, num in enumerate(columns["response_tokens"]) if num >= 3)
    rest = columns["response_tokens"][number] - 2
    of_tokens = {"trained": [1.0, 0.0] + [1.0] * rest, "turn": [0.0, 0.0] + [1.0] * rest}
    columns["fields"][number] += [
        {"name": name, "values": values}
        for name, values in {**of_tokens, "turn_rewards": [0.5, -1.0]}.items()
    ]
    sample_files.write(run.run_dir, 1, 0, columns)
    with served(run.run_dir) as address:
        page = viewer.open(address)
        page.locator(f'[data-key="{columns["id"][number]}"] .row').click()
        page.wait_for_selector(".tokens")
        shaded = page.locator(".tokens .reply")
        assert shaded.all_inner_texts() == [columns["token_texts"][number][1]]
        assert page.locator(".tokens .earned").all_inner_texts() == ["0.500", "-1.00"]
        kinds = page.locator(".detail .bar button").all_inner_texts()
        assert "turn" in kinds
        assert "trained" not in kinds
    assert viewer.errors == []


@pytest.mark.browser
def test_what_a_model_wrote_is_never_run(viewer: Any, address: str) -> None:
    page = viewer.open(address)
    title = page.title()
    assert choose(page, text="<script>") == ["4.0"]
    page.locator('[data-key="4.0"] .row').click()
    page.wait_for_selector(".tokens")
    hostile = "<script>document.title = 'owned'</script><b>7</b>"
    assert page.locator(".tokens span").first.inner_text() == hostile
    assert hostile in page.locator('[data-key="4.0"] .excerpt').inner_text()
    assert page.locator("#samples b b, #samples script, .tokens b").count() == 0
    assert page.title() == title
    # Nor would it be, were it put there as HTML: the page allows its own script alone.
    page.evaluate("document.body.append(Object.assign(document.createElement('script'),"
                  " {textContent: 'document.title = 7'}))")  # fmt: skip
    assert page.title() == title
    assert any("Content Security Policy" in error for error in viewer.errors)


# Who may ask, and for what


def test_nothing_outside_of_the_run_is_read(
    sampled_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_run, "_SHARE", math.inf)  # a page that is kept would be answered
    run = tmp_path / "run"
    shutil.copytree(sampled_run, run)
    (tmp_path / "secret.jsonl").write_text('{"step": 1, "phase": "rl", "response": "secret"}\n')
    asks = client(run)
    for path in (
        "/../secret.jsonl", "/%2e%2e/secret.jsonl", "/run/../../secret.jsonl", "/metrics.jsonl",
        "/samples/step-000001-rank-0000.parquet", "//etc/passwd",
    ):  # fmt: skip
        assert asks.get(path).status_code == 404
    for name in ("../../secret.jsonl", "/etc/passwd", "..", "%00"):
        assert asks.get("/sample", params={"step": "1", "key": name}).status_code == 404
        answer = asks.get("/samples", params={"step": name})
        assert (answer.status_code, answer.text) == (400, f"step={name}: wanted a number")
    (run / "samples.jsonl").unlink()
    (run / "samples.jsonl").symlink_to(tmp_path / "secret.jsonl")
    answer = asks.get("/data")
    assert (answer.status_code, "secret" in answer.text) == (400, False)
    with pytest.raises(ConfigError, match="without links to files outside of it"):
        WatchedRun(run)


def test_links_among_samples_are_looked_for_when_there_are_new_files(
    sampled_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret.parquet"
    shutil.copytree(sampled_run, run)
    watched, looks = WatchedRun(run), []
    check = watched._check_links
    monkeypatch.setattr(watched, "_check_links", lambda folder: (looks.append(1), check(folder)))
    monkeypatch.setattr(watched_run, "_SHARE", math.inf)  # it waits no time
    watched._not_before = 0.0
    watched.read()
    assert not looks
    shutil.copy(run / "samples" / "step-000001-rank-0000.parquet", secret)
    (run / "samples" / "step-000004-rank-0000.parquet").symlink_to(secret)
    for _ in range(2):
        with pytest.raises(ConfigError, match="without links to files outside of it"):
            watched.read()
    assert len(looks) == 2
    assert 4 not in watched.search._files


def test_a_look_that_finds_nothing_new_counts_as_reading(
    sampled_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of many ranks on a slow disk take time, too."""
    watched = WatchedRun(sampled_run)
    now, stamp = watched._not_before + 1, watched._stamp
    ticks = iter((now, now + 2))
    monkeypatch.setattr(watched_run.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(watched, "_stamp_now", lambda: stamp)
    watched.read()
    assert watched._not_before == pytest.approx(now + 20)


def test_links_to_the_run_and_within_it_are_fine(sampled_run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(sampled_run)
    assert client(tmp_path / "latest").get("/").status_code == 200


def test_other_methods_and_hosts_are_refused(sampled_run: Path) -> None:
    asks = client(sampled_run)
    assert asks.post("/data").status_code == asks.delete("/").status_code == 405
    assert asks.get("/data", headers={"host": "evil.example"}).status_code == 400
    asks = TestClient(make_app(WatchedRun(sampled_run), None, ["[::1]"]))
    assert asks.get("/data", headers={"host": "[::1]:6007"}).status_code == 200
    assert asks.get("/data", headers={"host": "[::2]:6007"}).status_code == 400


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no socket listens on IPv6 and IPv4")
def test_all_addresses_are_those_of_ipv4_too() -> None:
    with listen("::", 0) as listening:
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=30).close()


def test_a_token_is_asked_for_once(sampled_run: Path) -> None:
    asks = client(sampled_run, TOKEN)
    for path in ("/", "/data", "/samples", "/sample?step=1&key=3.0", "/?token=", "/?token=é"):
        answer = asks.get(path)
        assert (answer.status_code, "prompt" in answer.text) == (403, False)
    answer = asks.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert asks.get("/").status_code == asks.get("/data").status_code == 200
    other = client(sampled_run, TOKEN)
    other.cookies.update(dict.fromkeys(asks.cookies, "wrong"))
    assert other.get("/").status_code == 403


@pytest.mark.browser
def test_a_browser_with_the_token_follows_the_run(viewer: Any, sampled_run: Path) -> None:
    with served(sampled_run, TOKEN) as address:
        page = viewer.open(f"{address}?token={TOKEN}")
        assert page.url == address
        assert len(rows(page)) == 19
        page.close()
    assert not [error for error in viewer.errors if "403" in error]


def test_only_what_is_new_is_sent(new_sampled_run: Any, tmp_path: Path) -> None:
    with new_sampled_run(tmp_path / "run") as run:
        run.step(1)
        watched = WatchedRun(tmp_path / "run")
        asks = TestClient(make_app(watched, None, ["testserver"]))
        version = asks.get("/data").json()["live"]["version"]
        assert asks.get(f"/data?have={version}").status_code == 204
        run.step(2)
        time.sleep(max(0.0, watched._not_before - time.monotonic()))
        answer = asks.get(f"/data?have={version}").json()
        (reward,) = [chart for chart in answer["charts"] if chart["id"] == "reward"]
        assert [point["step"] for point in reward["series"][0]["points"]] == [1, 2]


def test_a_line_that_is_being_written_does_not_disturb(
    new_sampled_run: Any, tmp_path: Path
) -> None:
    with new_sampled_run(tmp_path / "run") as run:
        run.step(1)
        lines = JsonLines(tmp_path / "run" / "metrics.jsonl")
        os.write(lines._fd, b'{"step": 2, "phase": "rl", "rew')
        lines.close()
        data = client(tmp_path / "run").get("/data").json()
        assert data["state"] == "running"


# The command


@contextlib.contextmanager
def command(*args: object, cwd: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`hybridrl watch` and the line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridrl.cli", "watch", *map(str, args)], cwd=cwd,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.browser
def test_the_command_serves_until_ctrl_c(viewer: Any, sampled_run: Path) -> None:
    with command(sampled_run, "--port=0") as (process, line):
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/ ", line)
        page = viewer.open(address.strip())
        assert page.locator("h1").inner_text() == "sampled"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")


def test_a_wide_host_gets_a_token(sampled_run: Path) -> None:
    with command(sampled_run, "--port=0", "--host=0.0.0.0") as (process, line):
        port, token = re.findall(
            rf"http://{re.escape(socket.gethostname())}:(\d+)/\?token=(\S+)", line
        )[0]
        assert len(token) >= 20
        with socket.create_connection(("127.0.0.1", int(port))) as connection:
            connection.sendall(b"GET /data HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b" 403 " in connection.recv(1000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "arguments=.*: wanted RUN$"),
        (("NONE",), "run=.*none: wanted a run directory"),
        (("RUN", "--port=70000"), r"--port=70000: wanted 0 \(any free port\) to 65535"),
        (("RUN", "--port=-1"), "--port=-1: wanted 0"),
        (("RUN", "--port=x"), "invalid int value: 'x'"),
        (("RUN", "--port=TAKEN"), r"--port=\d+: wanted a free port: another program has it"),
        (("RUN", "--host=203.0.113.7"), "--host=203.0.113.7: wanted an address of this machine"),
        (("RUN", "--host=no such host"), "--host=no such host: wanted an address of this machine"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_input_is_one_line(
    sampled_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    message: str,
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        names = {"NONE": tmp_path / "none", "RUN": sampled_run, "--port=TAKEN": f"--port={port}"}
        with pytest.raises(SystemExit) as end:
            cli.main(["watch", *(str(names.get(arg, arg)) for arg in args)])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert re.search(message, err)


def test_which_hosts_are_this_machines_alone() -> None:
    assert all(map(watch.is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
    assert not any(map(watch.is_loopback, ("0.0.0.0", "::", "10.0.0.3", "login.example")))


PAGE = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()


@pytest.fixture
def runs_latest(sampled_run: Path, tmp_path: Path) -> Path:
    """The directory in which a reader of docs/watch.md is."""
    shutil.copytree(sampled_run, tmp_path / "runs" / "latest")
    return tmp_path


def test_the_commands_of_the_docs_serve(runs_latest: Path) -> None:
    commands = re.findall("^hybridrl watch (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for line in commands:
        with command(*shlex.split(line), "--port=0", cwd=runs_latest) as (_, printed):
            assert printed.startswith("runs/latest: http://")


def test_the_program_of_the_docs_reads_the_samples(
    runs_latest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = re.findall("^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(runs_latest)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(runs_latest / "cache"))
    names: dict[str, Any] = {}
    exec(program, names)
    assert len(names["samples"]) == 18
    assert names["best"]["reward"][:] == [1.0] * 9


def test_the_docs_have_every_column() -> None:
    table = PAGE.partition("| column | content |")[2].partition("\n\n")[0]
    rows = [row.split(" | ")[0] for row in table.splitlines()]
    assert re.findall(r"`(\w+)`", " ".join(rows)) == sample_files.schema().names
