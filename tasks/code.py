"""Digest of the code that can change a stage's output, read from the source text without importing it.

It covers the project modules that the stage's module imports, directly or through others, without comments and
docstrings: a better comment makes nothing anew. Modules whose text can't change a stage's result are left out by name:
the contracts (their values enter the key by themselves), messages, where the base model lies (its content enters the
key), which process does the work, and the layout of the report.
"""

import ast
import hashlib
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).parent.parent
PACKAGES = ("tasks", "schemas")
NEUTRAL = frozenset(
    {
        "schemas.config",
        "schemas.errors",
        "schemas.manifest",
        "schemas.reports",
        "tasks.hubs",
        "tasks.locations",
        "tasks.report",
        "tasks.stages",
        "tasks.workers",
    }
)


def code_digests(module: str, project: Path = PROJECT) -> dict[str, str]:
    """Digest of each project module in the static import closure of a module, by module name.

    Args:
        module: dotted name, for example `tasks.train`.
        project: folder that holds the packages.
    """
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found or name in NEUTRAL:
            continue
        path = _module_path(name, project)
        if path is None:
            continue
        digest, imported = _read_module(path, path.stat().st_mtime_ns, project)
        found[name] = digest
        waiting.extend(imported)
    return dict(sorted(found.items()))


def _module_path(name: str, project: Path) -> Path | None:
    base = project.joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def _read_module(path: Path, _mtime_ns: int, project: Path) -> tuple[str, tuple[str, ...]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.append(node.module)
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
        _drop_docstring(node)
    # a package's own __init__ runs before its modules
    parents = [name.rpartition(".")[0] for name in imported]
    wanted = {name for name in (*imported, *parents) if name.split(".")[0] in PACKAGES and _module_path(name, project)}
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest(), tuple(sorted(wanted))


def _drop_docstring(node: ast.AST) -> None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        node.body = node.body[1:] or [ast.Pass()]
