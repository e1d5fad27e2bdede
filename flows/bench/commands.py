"""The commands `mindtune bench ...`: each measures in one run, and prints ratios with the single figures below them."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from flows.answers import Json, answer

bench_app = typer.Typer(no_args_is_help=True, help="Measure side by side with the peers (after `make bench`).")

Copies = Annotated[list[int] | None, typer.Option("--copies", min=1, help="How often the 10,021 records are taken.")]


@bench_app.command()
def tokenize(copies: Copies = None, as_json: Json = False) -> None:
    """The stage `tokenize` beside `datasets`' load_dataset and map, and what packing saves."""
    from flows.bench import tokenize as bench

    _measure(lambda: bench.run(tuple(copies or bench.COPIES)), as_json)


@bench_app.command()
def loading(as_json: Json = False) -> None:
    """Batches from packed shards, beside the training that takes them."""
    from flows.bench import loading as bench

    _measure(bench.run, as_json)


def _measure(work: Callable[[], dict[str, Any]], as_json: bool) -> None:
    def measured() -> tuple[dict[str, Any], Any]:
        document = work()
        return document, "\n".join(_lines(document))

    answer(measured, as_json)


def _lines(value: Any, indent: str = "") -> list[str]:
    """Nested figures, one a line."""
    lines: list[str] = []
    for name, below in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(below, (dict, list)):
            lines += [f"{indent}{name}:", *_lines(below, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {below}")
    return lines
