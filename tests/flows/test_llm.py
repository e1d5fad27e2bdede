"""The flow and its Prefect states, with fake stages in real child processes on one real test server."""

import time
from pathlib import Path

import pytest

from schemas.config import LlmConfig
from schemas.errors import MindtuneError
from schemas.manifest import STAGES, RunSpec
from tasks import runner
from tasks.store import Store

FAKE_CHILD = Path(__file__).parents[1] / "support" / "fake_child.py"


@pytest.fixture(scope="module")
def _server():
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    quiet = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_LOGGING_TO_API_ENABLED: False}
    with prefect_test_harness(server_startup_timeout=90), temporary_settings(quiet):
        yield


@pytest.fixture
def start(_server, tmp_path, stories, monkeypatch):
    """A function that starts the flow and gives (states of the task runs by stage, run record)."""
    from prefect.client.orchestration import get_client

    from flows.llm import finetune_llm

    monkeypatch.setattr(runner, "CHILD", (str(FAKE_CHILD),))
    monkeypatch.setattr("tasks.plan.code_digests", lambda module: {module: "the same"})
    data = tmp_path / "fine.jsonl"
    data.write_text('{"instruction": "a", "output": "b"}\n')
    store = Store(tmp_path / "root")

    def run(data_file: str = "fine.jsonl", **spec):
        (tmp_path / data_file).write_bytes(data.read_bytes())
        values = {"model": {"base": str(stories)}, "data": {"train": [str(tmp_path / data_file)]}}
        config = LlmConfig.model_validate(values)
        record = store.new_run(config, "test", "test")
        state = finetune_llm(RunSpec(run=record.run, config=config, root=str(store.root), **spec), return_state=True)
        flow_run = state.state_details.flow_run_id
        wanted = sum(outcome.action != "not_run" for outcome in store.read_run(record.run).stages)
        with get_client(sync_client=True) as client:
            deadline = time.monotonic() + 20
            while True:  # task runs are recorded asynchronously
                found = {
                    one.name.rsplit("-", 1)[0]: one.state.name
                    for one in client.read_task_runs(flow_run_filter=_of(flow_run))
                    if one.state and one.state.is_final()
                }
                if len(found) >= wanted or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        return found, store.read_run(record.run), state

    run.store = store
    return run


def _of(flow_run):
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    return FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))


def _actions(record):
    return [outcome.action for outcome in record.stages]


def test_six_stages_complete_and_then_are_cached(start):
    states, record, _ = start()
    assert _actions(record) == ["ran"] * 6
    assert sorted(states.values()) == ["Completed"] * 6
    states, again, _ = start()
    assert _actions(again) == ["reused"] * 6
    assert sorted(states.values()) == ["Cached"] * 6
    assert [one.digest for one in again.stages] == [one.digest for one in record.stages]


def test_prefects_records_can_be_deleted_without_loss(start):
    start()
    for path in (start.store.root / "prefect").iterdir():
        path.unlink()
    states, record, _ = start()
    assert _actions(record) == ["reused"] * 6
    assert set(states.values()) == {"Cached"}


def test_a_lost_or_damaged_artifact_is_made_again_although_prefect_has_a_record(start):
    _, first, _ = start()
    merged = Path(first.outcome("merge").path)
    (merged / "data.txt").write_text("damaged")
    states, record, _ = start()
    assert _actions(record) == ["reused", "reused", "reused", "ran", "reused", "reused"]
    assert sorted(states.values()) == ["Cached"] * 5 + ["Completed"]


def test_a_forced_stage_is_made_again(start):
    start()
    _, record, _ = start(force=("export",))
    assert _actions(record) == ["reused", "reused", "reused", "reused", "ran", "reused"]
    assert record.outcome("export").reason == "asked for (--force)"


def test_a_failed_stage_fails_the_flow_and_leaves_no_artifact(start):
    states, record, state = start("error.jsonl")
    assert state.is_failed()
    with pytest.raises(MindtuneError, match="/gone does not exist"):
        state.result()
    assert _actions(record) == ["failed", *["not_run"] * 5]
    assert not list(start.store.artifact_folders())
    assert "Failed" in states.values()


def test_the_stages_are_the_flows_body():
    from flows import llm

    text = Path(llm.__file__).read_text(encoding="utf-8")
    places = [text.index(f'stage("{name}"') for name in STAGES]
    assert places == sorted(places)
