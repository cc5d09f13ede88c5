"""Write the tables of README.md that are made from code: `python bench/readme_tables.py`."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from trinfer.config import DEPRECATED, UNBUILT, InferenceConfig
from trinfer.config.section import Section
from trinfer.kernels import OPS, Op
from trinfer.survey import survey

README = Path(__file__).resolve().parent.parent / "README.md"
RESULTS = README.parent / "bench" / "results"


def config_tables() -> str:
    """Every field of InferenceConfig and its sections, then the deprecated names, as Markdown."""
    return "\n".join([*section_tables("", InferenceConfig), *deprecated_table()]) + "\n"


def section_tables(path: str, section: type[Section]) -> list[str]:
    """The table of one section, then those of the sections inside it."""
    lines = [f"**`{path}`**", ""] if path else []
    lines += ["| field (alias) | default | meaning | today |", "|---|---|---|---|"]
    inner: list[str] = []
    for name, field in section.model_fields.items():
        here = f"{path}.{name}".lstrip(".")
        alias = f" (`{field.alias}`)" if field.alias else ""
        below = section.inner(name)
        status = today(here, "see below" if below else "acts")
        lines.append(f"| `{name}`{alias} | `{shown(field.default)}` | {field.description} | {status} |")
        inner += section_tables(here, below) if below else []
    return [*lines, "", *inner]


def deprecated_table() -> list[str]:
    """Old names and where their values go."""
    rows = [
        f"| `{old}` | {f'`{new}`' if new else 'nowhere: leave it out'} |" for old, new in DEPRECATED.items()
    ]
    return ["**Deprecated names**", "", "| old | new |", "|---|---|", *rows]


def today(path: str, open_status: str) -> str:
    """What the field at the dotted `path` does today; `open_status` where nothing is left to build."""
    if path in UNBUILT:
        return f"only `{UNBUILT[path].allowed}`"
    parents = path.split(".")[:-1]
    is_closed = any(".".join(parents[: depth + 1]) in UNBUILT for depth in range(len(parents)))
    return "not yet" if is_closed else open_status


def shown(default: Any) -> str:
    """A default as a caller would type it."""
    return str(default).removeprefix("torch.") if isinstance(default, torch.dtype) else repr(default)


def kernel_table() -> str:
    """Every op with its formula, the first line of its docstring."""
    rows = [f"| `{op.name}` | {formula(op)} |" for op in OPS]
    return "\n".join(["| op | what it computes |", "|---|---|", *rows]) + "\n"


def formula(op: Op) -> str:
    """The first sentence of an op's docstring."""
    text = (op.launcher.__doc__ or "").strip().partition("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


def comparison_tables() -> str:
    """What `bench/compare.py` and `bench/interpreter.py` found, a table a device."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("*.json")):
        rows = json.loads(path.read_text()).get("comparisons", [])
        if not rows:
            continue
        machine, dates = rows[0]["machine"], sorted(row["date"][:10] for row in rows)
        lines += [
            *[""][: len(lines)],
            f"{machine['device']}, {machine['cores']} cores, torch {machine['torch']}, "
            f"triton {machine['triton']}, {dates[-1]}:",
            "",
            "| | threads | times as fast as |",
            "|---|---|---|",
            *(f"| {r['name']} | {r['threads']} | {times(r['ratio'])} x {r['against']} |" for r in rows),
        ]
    return "\n".join(lines) + "\n"


def model_tables() -> str:
    """What `bench/generate.py` and `bench/encode.py` found, a table a device."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        # rows of before the step was recorded say nothing of memory
        decoded = [row for row in content.get("generate", []) if "share_of_read" in row["trinfer"]]
        encoded = content.get("encode", [])
        if not decoded and not encoded:
            continue
        machine = (decoded or encoded)[0]["machine"]
        date = max(row["date"][:10] for row in (*decoded, *encoded))
        lines += [
            *[""][: len(lines)],
            f"{machine['device']}, {machine['cores']} cores, torch {machine['torch']}, "
            f"transformers {machine['transformers']}, triton {machine['triton']}, {date}:",
            "",
            "| | decoding | prefill | memory |",
            "|---|---|---|---|",
            *map(decode_row, decoded),
            *map(encode_row, encoded),
        ]
    return "\n".join(lines) + "\n"


def decode_row(row: dict[str, Any]) -> str:
    """One row of `bench/generate.py`."""
    beside = f", {row['competitors']} busy process beside" if row["competitors"] else ""
    what = f"{row['model']} {row['dtype']}, batch {row['batch']}, prompt {row['prompt_tokens']}{beside}"
    speeds = f"{times(row['tokens_per_s_ratio'])} x | {times(row['prefill_ms_ratio'])} x"
    return f"| {what} | {speeds} | {row['trinfer']['share_of_read']:.0%} |"


def encode_row(row: dict[str, Any]) -> str:
    """One row of `bench/encode.py`."""
    what = f"{row['model']} {row['dtype']}, {row['rows']} sentences of {row['tokens']} tokens, against fp32"
    return f"| {what} | | {times(row['ratio'])} x | |"


def times(ratio: float) -> str:
    """A ratio with the digits that mean something."""
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.2f}"


def architecture_table() -> str:
    """What `trinfer plan --all` says, as Markdown."""
    header = ("architecture", "layers run", "launches a layer", "step", "attention", "kept, and why")
    lines = [f"| {' | '.join(header)} |", "|---|---|---|---|---|---|"]
    for row in survey():
        name, _, *cells = row.cells()
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return f"With transformers {transformers.__version__}:\n\n" + "\n".join(lines) + "\n"


TABLES = {
    "architecture": architecture_table,
    "config": config_tables,
    "kernel": kernel_table,
    "model": model_tables,
    "comparison": comparison_tables,
}


def with_tables(text: str, *left: str) -> str:
    """The text of the README with its tables made anew, but for those whose names are `left`."""
    for name, table in TABLES.items():
        if name in left:
            continue
        begin = f"<!-- begin of the {name} tables (bench/readme_tables.py) -->\n"
        end = f"<!-- end of the {name} tables -->\n"
        head, rest = text.split(begin)
        text = head + begin + table() + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
