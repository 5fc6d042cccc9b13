"""Draw the pictures of the pages: `python scripts/pictures.py` writes docs/images/*.svg.

`architecture.svg`: the driver, the ranks, both engines, the switch. `step.svg`: a step's timeline
under `schedule=serial` and `schedule=fused`, a sketch and no measurement. `tail.svg`: such steps of
emulated runs, by docs/images/tail.json (`scripts/bench/tail_timeline.py`). Each stands on a light
card, so that it reads well on white and on dark pages.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parents[1] / "docs/images"

INK, SOFT, LINE, CARD, BOX = "#1f2933", "#52606d", "#9aa5b1", "#f7f9fb", "#ffffff"
COLORS = {
    "driver": "#dbe7f6",
    "train": "#f6dcc8",
    "generate": "#cfe8d5",
    "switch": "#f2c14e",
    "reference": "#c9c6ea",
    "idle": "#e4e7eb",
    "verify": "#9fd3ae",
    "wide": "#5fae78",
    "early": "#e8a87c",
    "store": "#eef1f4",
}


def text(x: float, y: float, words: str, size: int = 13, **more: str) -> str:
    """A line of text; `more` are further attributes, _ for -."""
    style = {"fill": INK, "text_anchor": "middle", **more}
    attributes = " ".join(f'{key.replace("_", "-")}="{value}"' for key, value in style.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {attributes}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = LINE) -> str:
    """A rectangle with round corners."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="5" fill="{fill}" stroke="{stroke}"/>'


def labeled(x: float, y: float, width: float, height: float, fill: str, *lines: str) -> str:
    """A box with lines of text in its middle, the first one bold."""
    first = y + height / 2 - 8 * (len(lines) - 1) + 4.5
    drawn = [box(x, y, width, height, fill)]
    for i, line in enumerate(lines):
        weight = {"font_weight": "600"} if i == 0 else {"fill": SOFT}
        drawn.append(text(x + width / 2, first + 16 * i, line, 13 if i == 0 else 12, **weight))
    return "\n".join(drawn)


def arrow(x1: float, y1: float, x2: float, y2: float, both: bool = False) -> str:
    """A line with a head at its end, or at both."""
    heads = 'marker-end="url(#head)"' + (' marker-start="url(#head)"' if both else "")
    place = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {place} stroke="{SOFT}" stroke-width="1.5" {heads}/>'


def picture(width: int, height: int, title: str, drawn: Sequence[str]) -> str:
    """The whole file."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{SOFT}"/></marker>'
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
        f"<title>{escape(title)}</title>",
        f"<defs>{head}</defs>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" fill="{CARD}" '
        f'stroke="{COLORS["idle"]}"/>',
        *drawn,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def rank(x: float, y: float, name: str) -> list[str]:
    """One rank: both engines, the switch between them, and its samples."""
    return [
        box(x, y, 400, 216, BOX),
        text(x + 14, y + 22, name, 14, font_weight="600", text_anchor="start"),
        labeled(
            x + 14,
            y + 36,
            138,
            92,
            COLORS["train"],
            "train engine",
            "FSDP2 x tp x pp",
            "float32 shards,",
            "AdamW",
        ),
        labeled(x + 174, y + 58, 52, 48, COLORS["switch"], "switch"),
        arrow(x + 153, y + 82, x + 172, y + 82),
        arrow(x + 228, y + 82, x + 247, y + 82),
        labeled(
            x + 248,
            y + 36,
            138,
            92,
            COLORS["generate"],
            "rollout engine",
            "native or vLLM,",
            "instance of tp x pp,",
            "paged KV cache",
        ),
        labeled(x + 14, y + 142, 138, 60, COLORS["reference"], "scorers", "reference, reward"),
        labeled(x + 162, y + 142, 108, 60, COLORS["store"], "sample store", "tensors"),
        labeled(x + 280, y + 142, 106, 60, COLORS["store"], "verifiers", "sandboxed"),
    ]


def architecture() -> str:
    """The driver above two of its ranks, the data plane below."""
    drawn = [
        box(20, 18, 860, 96, COLORS["driver"]),
        text(
            36,
            42,
            "driver: one process, metadata and scalars",
            14,
            font_weight="600",
            text_anchor="start",
        ),
        labeled(36, 54, 180, 46, BOX, "recipe", "what happens to samples"),
        arrow(217, 77, 245, 77),
        labeled(247, 54, 180, 46, BOX, "schedule", "when and where"),
        arrow(428, 77, 456, 77),
        labeled(458, 54, 180, 46, BOX, "executor", "calls and events"),
        labeled(684, 54, 180, 46, BOX, "records", "metrics, checkpoints"),
        arrow(220, 116, 220, 152, both=True),
        arrow(680, 116, 680, 152, both=True),
        text(340, 139, "calls: ids, stages", 12, fill=SOFT),
        text(556, 139, "events: lengths, rewards", 12, fill=SOFT),
        *rank(20, 156, "rank 0"),
        *rank(480, 156, "rank n - 1"),
        text(450, 268, "...", 22, fill=SOFT),
        arrow(220, 374, 220, 396, both=True),
        arrow(680, 374, 680, 396, both=True),
        labeled(
            20,
            398,
            860,
            44,
            COLORS["store"],
            "data plane",
            "samples, and parked samples with their KV cache, from rank to rank",
        ),
    ]
    return picture(900, 460, "hybridrl: one driver, SPMD ranks that train and generate", drawn)


Slices = Sequence[tuple[str, float, float, str]]  # kind, from, to (seconds), label

SERIAL: Sequence[Slices] = (
    (
        ("switch", 0, 0.5, ""),
        ("generate", 0.5, 4, "generate"),
        ("idle", 4, 10, "idle"),
        ("reference", 10, 11.6, "ref."),
        ("train", 12, 14.5, "update"),
    ),
    (
        ("switch", 0, 0.5, ""),
        ("generate", 0.5, 10, "generate, with a long tail"),
        ("reference", 10, 12, "ref."),
        ("train", 12, 14.5, "update"),
    ),
    (
        ("switch", 0, 0.5, ""),
        ("generate", 0.5, 7.5, "generate"),
        ("idle", 7.5, 10, "idle"),
        ("reference", 10, 11.6, "ref."),
        ("train", 12, 14.5, "update"),
    ),
)
FUSED: Sequence[Slices] = (
    (
        ("switch", 0, 0.5, ""),
        ("generate", 0.5, 4, "generate"),
        ("reference", 4, 9.9, "reference, as samples finish"),
        ("train", 10.1, 12.6, "update"),
    ),
    (
        ("switch", 0, 0.5, ""),
        ("generate", 0.5, 9.8, "generate; the tail gathers here"),
        ("train", 10.1, 12.6, "update"),
    ),
    (
        ("switch", 0, 0.5, ""),
        ("generate", 0.5, 5.6, "generate"),
        ("reference", 5.7, 9.9, "reference"),
        ("train", 10.1, 12.6, "update"),
    ),
)
SECOND, LEFT, LANE = 54, 96, 34


def timeline(y: float, name: str, lanes: Sequence[Slices]) -> list[str]:
    """A lane for each rank, and the step's end."""
    drawn = [text(20, y - 12, name, 14, font_weight="600", text_anchor="start")]
    for number, lane in enumerate(lanes):
        top = y + number * LANE
        drawn.append(text(20, top + 19, f"rank {number}", 12, fill=SOFT, text_anchor="start"))
        for kind, start, stop, label in lane:
            x, width = LEFT + start * SECOND, (stop - start) * SECOND - 2
            drawn.append(box(x, top, width, LANE - 6, COLORS[kind], stroke="none"))
            drawn.append(text(x + width / 2, top + 18.5, label, 12))
    return drawn


def step() -> str:
    """Serial above fused: the same batch, sooner."""
    end = {
        name: max(lane[-1][2] for lane in lanes)
        for name, lanes in (("serial", SERIAL), ("fused", FUSED))
    }
    ends = {name: LEFT + seconds * SECOND for name, seconds in end.items()}
    drawn = [
        f'<line x1="{ends["fused"]:g}" y1="40" x2="{ends["fused"]:g}" y2="302" '
        f'stroke="{LINE}" stroke-dasharray="4 4"/>',
        *timeline(46, "schedule=serial: every stage waits for the whole batch", SERIAL),
        *timeline(196, "schedule=fused: the same batch, sooner", FUSED),
        arrow(LEFT + 5.6 * SECOND, 196 + 2 * LANE + 2, LEFT + 5.9 * SECOND, 196 + 2 * LANE - 8),
        arrow(ends["serial"] - 2, 246, ends["fused"] + 4, 246),
        text((ends["serial"] + ends["fused"]) / 2, 238, "won", 12, fill=SOFT),
        box(LEFT, 316, 16, 14, COLORS["switch"], stroke="none"),
        text(LEFT + 24, 328, "weight switch", 12, text_anchor="start", fill=SOFT),
        text(
            LEFT + 150,
            328,
            "time runs to the right; a sketch, not a measurement",
            12,
            text_anchor="start",
            fill=SOFT,
        ),
    ]
    return picture(900, 346, "A step under schedule=serial, and under schedule=fused", drawn)


TAIL_TITLES = {
    "serial": "schedule=serial",
    "fused": "schedule=fused: passes while the tail decodes, which moves to few instances",
    "early": "the same batch, free instances train",
    "all": "the same batch: samples guess ahead, instances join for the last ones, free ones train",
}
TAIL_KINDS = {
    "switch": ("switch", "weight switch"),
    "generate": ("generate", "generate"),
    "verify": ("verify", "generate, guessing ahead"),
    "wide decode": ("wide", "on joined instances"),
    "reference_log_probs": ("reference", "reference"),
    "early backward": ("early", "early backward"),
    "update": ("train", "update"),
}
TAIL_LEFT, TAIL_WIDTH, TAIL_LANE = 20, 860, 9


def tail() -> str:
    """A step of emulated runs, a lane an instance: docs/images/tail.json is the measurement."""
    record = json.loads((IMAGES / "tail.json").read_text())
    sides: dict[str, list[list[tuple[str, float, float]]]] = record["sides"]
    ends = {name: max(end for lane in lanes for _, _, end in lane) for name, lanes in sides.items()}
    scale = TAIL_WIDTH / max(ends.values())
    drawn, top, kinds = [], 34.0, dict.fromkeys(TAIL_KINDS, False)
    for name, lanes in sides.items():
        end = TAIL_LEFT + ends[name] * scale
        title = f"{TAIL_TITLES[name]}: {ends[name]:.0f} s"
        drawn.append(text(TAIL_LEFT, top - 8, title, 13, font_weight="600", text_anchor="start"))
        for number, lane in enumerate(lanes):
            y = top + number * TAIL_LANE
            drawn.append(box(TAIL_LEFT, y, end - TAIL_LEFT, TAIL_LANE - 2, COLORS["idle"], "none"))
            for slice_name, start, stop in lane:
                color, _ = TAIL_KINDS[slice_name]
                kinds[slice_name] = True
                x, width = TAIL_LEFT + start * scale, (stop - start) * scale
                drawn.append(flat(x, y, width, TAIL_LANE - 2, COLORS[color]))
        top += len(lanes) * TAIL_LANE + 34
    x = float(TAIL_LEFT)
    shown = [TAIL_KINDS[kind] for kind, occurs in kinds.items() if occurs]
    for color, words in [*shown, ("idle", "idle")]:
        drawn.append(flat(x, top - 20, 14, 12, COLORS[color]))
        drawn.append(text(x + 20, top - 10, words, 12, text_anchor="start", fill=SOFT))
        x += 30 + 6.1 * len(words)
    drawn.append(
        text(
            TAIL_LEFT,
            top + 10,
            f"measured on an emulated device of {record['ranks']} GPUs: a lane is an instance, "
            "time runs to the right",
            12,
            text_anchor="start",
            fill=SOFT,
        )
    )
    return picture(900, round(top + 24), "A step with a long tail under several schedules", drawn)


def flat(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A slice without a frame."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}"/>'


PICTURES = {"architecture.svg": architecture, "step.svg": step, "tail.svg": tail}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())
