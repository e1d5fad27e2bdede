"""The artifact store: the one truth about what is finished and can be reused.

    <root>/<stage>/<key>/           one whole artifact; `manifest.json` was written last
    <root>/runs/<run>.json          which artifact each stage of a run has
    <root>/work/<stage>/<key>/      unfinished: `build/` is thrown away, `keep/` (checkpoints) outlives a failed attempt
    <root>/work/locks/              one writer per key, by flock: the kernel frees it when the holder dies
    <root>/aside/damaged/           artifacts that could not be used, each with the reason beside it
    <root>/aside/replaced/          artifacts that a forced rerun replaced, for the runs that name them
    <root>/prefect/                 Prefect's records of results (`tasks/cached.py`)

An artifact is built beside its place and renamed into it, so a reader sees all of it or nothing. Its digest is over the
payload, the part that is a function of the key, and the settings and outside inputs that it was made with; every file's
own digest is kept as well, for integrity.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from schemas.config import LlmConfig
from schemas.errors import InputError, StoreError
from schemas.manifest import (
    MANIFEST_VERSION,
    RUN_RECORD_VERSION,
    STAGES,
    ArtifactRef,
    FileEntry,
    Manifest,
    RunRecord,
    StageName,
    StageOutcome,
    StageResult,
)
from tasks.files import digest_of, sha256_file, sync_folder, sync_tree, write_atomically

log = logging.getLogger("mindtune.store")

MANIFEST = "manifest.json"
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
_HEX = re.compile(r"[0-9a-f]{64}")

Document = TypeVar("Document", bound=BaseModel)


class Store:
    """Artifacts and run records below one root.

    Args:
        root: absolute folder; made when first written to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._verified: set[tuple[str, str]] = set()  # keys and digests

    # Artifacts

    def folder(self, stage: StageName, key: str) -> Path:
        """Where the artifact of a key lies or would lie."""
        return self.root / stage / key

    def work_folder(self, stage: StageName, key: str) -> Path:
        """Where the unfinished work on a key lies."""
        return self.root / "work" / stage / key

    def read_manifest(self, folder: Path) -> Manifest:
        """The manifest of an artifact folder.

        Raises:
            StoreError: it is missing or unreadable (store.damaged), or of another version (store.version).
        """
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError("store.damaged", path=folder, problem=f"no readable {MANIFEST}") from error
        return _parse(Manifest, text, folder / MANIFEST, MANIFEST_VERSION)

    def find(self, stage: StageName, key: str, deep: bool = False) -> tuple[ArtifactRef | None, str]:
        """The artifact of a key when it is whole, and why it is not usable otherwise.

        Nothing is changed: a damaged artifact is set aside by the writer that replaces it.

        Args:
            stage: the stage.
            key: its key.
            deep: check the content of each file by its digest, once in a process, besides manifest and sizes.
        """
        folder = self.folder(stage, key)
        if not os.path.lexists(folder):
            return None, "no earlier artifact"
        try:
            manifest = self.read_manifest(folder)
        except StoreError as error:
            return None, error.message
        checked = deep and (key, manifest.digest) not in self._verified
        if (manifest.stage, manifest.key) != (stage, key):
            problem: str | None = f"it belongs to {manifest.stage}/{manifest.key[:12]}"
        else:
            problem = self.verify(folder, manifest) if checked else _size_problem(folder, manifest)
        if problem:
            return None, StoreError("store.damaged", stage=stage, path=folder, problem=problem).message
        if checked:
            self._verified.add((key, manifest.digest))
        return _reference(manifest), "whole"

    def open(self, ref: ArtifactRef) -> Path:
        """The folder of an artifact, its files checked by digest the first time this process opens it.

        Raises:
            StoreError: it is gone (store.no_artifact) or damaged (store.damaged).
        """
        for folder in (self.folder(ref.stage, ref.key), self._replaced_folder(ref)):
            if not (folder / MANIFEST).is_file():
                continue
            manifest = self.read_manifest(folder)
            if manifest.digest != ref.digest:
                continue
            if (ref.key, ref.digest) not in self._verified:
                if problem := self.verify(folder, manifest):
                    raise StoreError("store.damaged", stage=ref.stage, path=folder, problem=problem)
                self._verified.add((ref.key, ref.digest))
            return folder
        raise StoreError("store.no_artifact", stage=ref.stage, key=ref.key[:12], digest=ref.digest[:12], root=self.root)

    def verify(self, folder: Path, manifest: Manifest) -> str | None:
        """What is wrong with an artifact's files, by their digests; None when all is well."""
        if problem := _size_problem(folder, manifest):
            return problem
        for entry in manifest.files:
            if sha256_file(folder / entry.path) != entry.sha256:
                return f"the content of {entry.path} has changed"
        named = {entry.path for entry in manifest.files}
        extra = sorted(set(_files_below(folder)) - named - {MANIFEST})
        extra = [name for name in extra if not Path(name).name.startswith(".")]  # file browsers leave such
        if extra:
            return f"files that no manifest names: {', '.join(extra[:5])}"
        if manifest.digest != _artifact_digest(manifest.stage, manifest.payload, manifest.key_document):
            return "the digest does not belong to the payload"
        if manifest.key != digest_of(manifest.key_document):
            return "the key does not belong to the key document"
        return None

    def manifests(self, stage: StageName) -> Iterator[Manifest]:
        """The readable manifests of a stage, newest first."""
        found = []
        for path in (self.root / stage).glob(f"*/{MANIFEST}"):
            with contextlib.suppress(StoreError):
                found.append(self.read_manifest(path.parent))
        return iter(sorted(found, key=lambda manifest: manifest.created, reverse=True))

    def artifact_folders(self) -> Iterator[tuple[StageName, Path]]:
        """Every folder that stands in the place of an artifact, whole or not."""
        for stage in STAGES:
            for folder in sorted((self.root / stage).glob("*")):
                if _HEX.fullmatch(folder.name):
                    yield stage, folder

    @contextlib.contextmanager
    def lock(self, stage: StageName, key: str) -> Iterator[int]:
        """Hold the right to write one key; gives the file handle, for a child process to hold it as well.

        Waits while another process holds it. A lock file is never deleted: that would free it for two.
        """
        with self._flock(f"{stage}-{key}", f"{stage}: another run is making {key[:12]}, waiting for it") as handle:
            yield handle

    @contextlib.contextmanager
    def _flock(self, name: str, waiting: str) -> Iterator[int]:
        path = self._lock_path(name)
        self._make_folder(path.parent)
        with self._named():
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info(waiting)
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)

    def _lock_path(self, name: str) -> Path:
        return self.root / "work" / "locks" / f"{name}.lock"

    def prepare_work(self, stage: StageName, key: str) -> Path:
        """An empty `build` folder beside the kept `keep` folder; the caller holds the lock. Gives their parent."""
        work = self.work_folder(stage, key)
        shutil.rmtree(work / "build", ignore_errors=True)
        self._make_folder(work / "build")
        self._make_folder(work / "keep")
        return work

    def publish(
        self,
        stage: StageName,
        key_document: Mapping[str, Any],
        result: StageResult,
        inputs: Mapping[StageName, ArtifactRef],
        run: str,
        seconds: float,
    ) -> ArtifactRef:
        """Turn the finished `build` folder of a key into its artifact; the caller holds the lock.

        An equal artifact that is there already stays. Another one with the same key is moved to `aside`: under its
        digest when it is whole, with the reason when it is damaged.

        Raises:
            StoreError: the payload is empty.
            OSError: no space, no permission; nothing was published then.
        """
        key = digest_of(key_document)
        work = self.work_folder(stage, key)
        build, target = work / "build", self.folder(stage, key)
        files = tuple(
            FileEntry(
                path=name,
                size_bytes=(build / name).stat().st_size,
                sha256=sha256_file(build / name),
                payload=name not in result.volatile,
            )
            for name in _files_below(build)
        )
        payload = result.payload or {entry.path: entry.sha256 for entry in files if entry.payload}
        if not payload:
            raise StoreError("store.damaged", stage=stage, path=build, problem="the stage left no payload")
        manifest = Manifest(
            stage=stage,
            key=key,
            key_document=dict(key_document),
            digest=_artifact_digest(stage, payload, key_document),
            payload=payload,
            files=files,
            inputs=dict(inputs),
            metrics=result.metrics,
            run=run,
            created=datetime.now(UTC),
            seconds=round(seconds, 3),
        )
        sync_tree(build)
        write_atomically(build / MANIFEST, manifest.model_dump_json(indent=1))
        self._make_folder(target.parent)
        reference = _reference(manifest)
        if os.path.lexists(target):
            self._verified.discard((key, reference.digest))
            earlier, problem = self.find(stage, key, deep=True)
            if earlier is not None and earlier.digest == reference.digest:
                log.info("%s: made again with the same digest, the earlier artifact stays", stage)
                shutil.rmtree(work, ignore_errors=True)
                return earlier
            if earlier is not None:
                self._move_aside(target, self._replaced_folder(earlier))
            else:
                self.set_aside(stage, key, problem)
        build.rename(target)
        sync_folder(target.parent)
        shutil.rmtree(work, ignore_errors=True)
        self._verified.add((key, reference.digest))
        return reference

    def set_aside(self, stage: StageName, key: str, reason: str) -> None:
        """Move an unusable artifact out of the way, with the reason beside it."""
        folder = self.folder(stage, key)
        aside = self.root / "aside" / "damaged" / f"{stage}-{key[:16]}-{uuid.uuid4().hex[:8]}"
        self._move_aside(folder, aside)
        write_atomically(aside.with_suffix(".reason.txt"), f"{datetime.now(UTC).isoformat()} {reason}\n")
        log.warning("%s: set aside as %s: %s", stage, aside, reason)

    def _replaced_folder(self, ref: ArtifactRef) -> Path:
        return self.root / "aside" / "replaced" / ref.stage / ref.key / ref.digest

    def _move_aside(self, folder: Path, aside: Path) -> None:
        self._make_folder(aside.parent)
        if aside.exists():  # replaced before by the same content
            shutil.rmtree(aside)
        folder.rename(aside)

    # Runs

    def write_run(self, record: RunRecord) -> None:
        """Write a run record down.

        Raises:
            StoreError: the root can't be written.
        """
        self._make_folder(self.root / "runs")
        with self._named():
            write_atomically(self._run_path(record.run), record.model_dump_json(indent=1))

    def read_run(self, run: str) -> RunRecord:
        """A run by name; `latest` is the readable one that was started last.

        Raises:
            InputError: there is none (store.no_run).
            StoreError: its record is unreadable (store.run_damaged) or of another version (store.version).
        """
        names = self.run_names()
        if run == "latest":
            for name in reversed(names):
                try:
                    return self.read_run(name)
                except StoreError as error:
                    log.warning(error.message)
        if run not in names:
            known = ", ".join(reversed(names[-5:])) or "none"
            raise InputError("store.no_run", run=run, root=self.root, known=known)
        path = self._run_path(run)
        try:
            record = _parse(RunRecord, path.read_text(encoding="utf-8"), path, RUN_RECORD_VERSION)
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError("store.run_damaged", path=path, problem=error) from error
        except StoreError as error:
            if error.code != "store.damaged":
                raise
            raise StoreError("store.run_damaged", path=path, problem=error.facts["problem"]) from error
        if record.status == "running" and not self._is_alive(run):
            return record.model_copy(update={"status": "interrupted"})
        return record

    def run_names(self) -> list[str]:
        """All runs, in the order in which they were started (names begin with the time)."""
        return sorted(path.stem for path in (self.root / "runs").glob("*.json") if _RUN_NAME.fullmatch(path.stem))

    def new_run(self, config: LlmConfig, source: str, label: str) -> RunRecord:
        """Record a run that begins now, under a name of time, label and a few random letters."""
        now = datetime.now(UTC)
        name = f"{now:%Y%m%d-%H%M%S}-{re.sub('[^A-Za-z0-9._-]+', '-', label)[:60]}-{uuid.uuid4().hex[:4]}"
        stages = tuple(StageOutcome(stage=stage, action="not_run", reason="not reached yet") for stage in STAGES)
        record = RunRecord(
            run=name, source=source, created=now, updated=now, status="running", config=config, stages=stages
        )
        self.write_run(record)
        return record

    def record_outcome(self, run: str, outcome: StageOutcome) -> RunRecord:
        """Put the outcome of one stage into its run; an artifact that it replaces goes into the history."""
        with self._change_run(run) as (record, write):
            earlier = record.outcome(outcome.stage)
            history = record.history
            if outcome.action == "failed" and earlier is not None and earlier.digest is not None:
                # the run still has the artifact that was to be made again
                outcome = earlier.model_copy(update={"action": "failed", "reason": outcome.reason})
            if earlier is not None and earlier.digest is not None and earlier.digest != outcome.digest:
                history = (*history, earlier)
            stages = tuple(outcome if old.stage == outcome.stage else old for old in record.stages)
            return write(stages=stages, history=history)

    @contextlib.contextmanager
    def alive(self, run: str) -> Iterator[None]:
        """Show a run as running for as long as this process holds on."""
        with self._flock(f"alive-{run}", f"run {run}: another process is working on it, waiting for it"):
            yield

    def _is_alive(self, run: str) -> bool:
        try:
            handle = os.open(self._lock_path(f"alive-{run}"), os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(handle)

    def restart_run(self, run: str) -> RunRecord:
        """Mark a run as running again."""
        with self._change_run(run) as (_, write):
            return write(status="running", error=None)

    def finish_run(self, run: str, config: LlmConfig) -> RunRecord:
        """Mark a run as done with a configuration."""
        with self._change_run(run) as (_, write):
            return write(status="done", config=config, error=None)

    def fail_run(self, run: str, error: Mapping[str, Any]) -> RunRecord:
        """Mark a run as failed; its configuration stays the one that its artifacts were made with."""
        with self._change_run(run) as (_, write):
            return write(status="failed", error=dict(error))

    @contextlib.contextmanager
    def _change_run(self, run: str) -> Iterator[tuple[RunRecord, Callable[..., RunRecord]]]:
        """A run's record and a function that writes it with other fields; nobody else changes it meanwhile."""
        with self._flock(f"run-{run}", f"run {run}: another process is changing its record, waiting for it"):
            record = self.read_run(run)

            def write(**fields: Any) -> RunRecord:
                changed = record.model_copy(update={**fields, "updated": datetime.now(UTC)})
                self.write_run(changed)
                return changed

            yield record, write

    def _run_path(self, run: str) -> Path:
        if not _RUN_NAME.fullmatch(run):
            raise InputError("store.no_run", run=run, root=self.root, known="mindtune runs lists them")
        return self.root / "runs" / f"{run}.json"

    def _make_folder(self, folder: Path) -> None:
        with self._named():
            folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Tell a root that can't be written by its name."""
        try:
            yield
        except OSError as error:
            raise StoreError("store.root_unusable", path=self.root, problem=str(error)) from error


def _reference(manifest: Manifest) -> ArtifactRef:
    return ArtifactRef(
        stage=manifest.stage,
        key=manifest.key,
        digest=manifest.digest,
        location=f"{manifest.stage}/{manifest.key}",
    )


def _artifact_digest(stage: StageName, payload: Mapping[str, str], key_document: Mapping[str, Any]) -> str:
    """Over payload, settings and outside inputs: a setting counts for its stage and all after it, also where the
    payload happens to come out the same. Code and libraries count by the payload alone."""
    made_with = {name: key_document.get(name) for name in ("config", "sources")}
    return digest_of({"stage": stage, "payload": dict(payload), **made_with})


def _files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _size_problem(folder: Path, manifest: Manifest) -> str | None:
    for entry in manifest.files:
        path = folder / entry.path
        if not path.is_file():
            return f"{entry.path} is missing"
        if path.stat().st_size != entry.size_bytes:
            return f"{entry.path} has {path.stat().st_size} bytes instead of {entry.size_bytes}"
    return None


def _parse(model: type[Document], text: str, path: Path, version: int) -> Document:
    try:
        document = model.model_validate_json(text)
    except ValidationError as error:
        found = _version_in(text)
        if found is not None and found != version:
            raise StoreError("store.version", path=path, found=found, known=version) from error
        place = ".".join(map(str, error.errors()[0]["loc"]))
        problem = error.errors()[0]["msg"] + (f" at {place}" if place else "")
        raise StoreError("store.damaged", path=path, problem=problem) from error
    found = getattr(document, "format_version", version)
    if found != version:
        raise StoreError("store.version", path=path, found=found, known=version)
    return document


def _version_in(text: str) -> object:
    try:
        return json.loads(text).get("format_version")
    except (ValueError, AttributeError):
        return None
