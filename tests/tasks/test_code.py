from pathlib import Path

import pytest

from tasks.code import code_digests
from tasks.stages import STAGES


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").write_text("")
    (tmp_path / "tasks" / "a.py").write_text("from tasks import b\n\ndef f():\n    return b.g()\n")
    (tmp_path / "tasks" / "b.py").write_text("def g():\n    return 1\n")
    (tmp_path / "tasks" / "c.py").write_text("def h():\n    return 1\n")
    return tmp_path


def test_comments_docstrings_and_layout_change_nothing(project):
    before = code_digests("tasks.a", project)
    (project / "tasks" / "b.py").write_text('"""Doc."""\n\n\ndef g():  # why\n    "doc"\n    return   1\n')
    assert code_digests("tasks.a", project) == before


def test_a_change_behind_an_import_counts(project):
    before = code_digests("tasks.a", project)
    (project / "tasks" / "b.py").write_text("def g():\n    return 2\n")
    after = code_digests("tasks.a", project)
    assert before["tasks.b"] != after["tasks.b"]
    assert before["tasks.a"] == after["tasks.a"]


def test_a_module_that_is_not_imported_does_not_count(project):
    assert "tasks.c" not in code_digests("tasks.a", project)


def test_an_import_inside_a_function_counts(project):
    (project / "tasks" / "b.py").write_text("def g():\n    from tasks.c import h\n    return h()\n")
    assert "tasks.c" in code_digests("tasks.a", project)


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_depends_on_its_own_module_and_not_on_the_command_line(stage):
    digests = code_digests(f"tasks.{stage}")
    assert f"tasks.{stage}" in digests
    assert not any(name.startswith("flows") or name in ("tasks.runner", "tasks.cached") for name in digests)


def test_training_does_not_depend_on_the_export_code():
    assert {"tasks.export", "tasks.models.cached"}.isdisjoint(code_digests("tasks.train"))
