"""Hostile and damaged files: a standing adversary of everything that reads them.

Each case is a valid folder of files (`SUBJECTS`), damaged once (`ACCIDENTS`, `INTENTS`), and opened by a process of its own with
bounded memory and time. It must open with the same result, or refuse in one sentence: never run what a file says, never end in
a traceback, never (where the format carries checksums) give another result after an accident. Each violation is a script that
unpacks the damaged files and opens them.
"""

import base64
import functools
import io
import multiprocessing as mp
import os
import random
import shutil
import sys
import tempfile
import traceback
import zipfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from equipoise.core.errors import EquipoiseError
from equipoise.testing.runner import Batch
from equipoise_lab.fuzz.mutations import ACCIDENTS, CANARY, INTENTS
from equipoise_lab.fuzz.subjects import SUBJECTS

#: of one opening: seconds of processor time, of waiting, and bytes of address space beyond those in use
CPU, PATIENCE, MEMORY = 60, 120, 6 * 2**30
CASES = 12  # openings per batch
#: what opening a file imports: imported once, before the processes part
_USED = (
    "equipoise.nn.models", "equipoise.train", "torch.export", "torch._dynamo", "torch._inductor.cpp_builder",
    "torch._export.serde.serialize", "torch.export.pt2_archive._package", "torch.export._unlift", "sympy", "sqlite3",
)  # fmt: skip


class Outcome(NamedTuple):
    """How an opening ended: "opened" with a result, "refused" with a sentence, or "failed" with what went wrong."""

    kind: str
    text: str


def opened(kind: str, folder: Path) -> Outcome:
    """Open in this process; anything but a result or one sentence is a failure."""
    try:
        return Outcome("opened", SUBJECTS[kind].open(folder))
    except EquipoiseError as error:
        sentence = str(error)
        if "\n" in sentence or len(sentence) > 2000:
            return Outcome("failed", f"a refusal that is no sentence: {sentence[:300]!r}")
        return Outcome("refused", sentence)
    except BaseException:  # noqa: BLE001  the traceback is the finding
        return Outcome("failed", traceback.format_exc())


def _child(answer: Connection, kind: str, folder: str) -> None:
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(nowhere, number)
    _limit()
    answer.send(tuple(opened(kind, Path(folder))))


def _limit() -> None:
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@functools.cache
def _context() -> Any:
    """Processes that start from one with everything imported, and nothing else of ours."""
    if sys.platform == "win32" or not Path("/proc/self/statm").exists():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["equipoise_lab.fuzz.files", *_USED])
    return context


def opened_apart(kind: str, folder: Path) -> Outcome:
    """Open in a process of its own, with limits; a process that dies or does not end is a failure."""
    receiver, sender = _context().Pipe(duplex=False)
    process = _context().Process(target=_child, args=(sender, kind, str(folder)), daemon=True)
    process.start()
    sender.close()
    try:
        answer = Outcome(*receiver.recv()) if receiver.poll(PATIENCE) else None
    except EOFError:
        answer = None
    if answer is None:
        process.kill()
    process.join()
    if answer is None:
        answer = Outcome("failed", f"the process ended with {process.exitcode} and gave no answer")
    if (folder / CANARY).exists() or (folder / CANARY).is_symlink():
        return Outcome(
            "failed", f"something in the files was EXECUTED ({answer.kind}: {answer.text[:200]})"
        )
    return answer


@functools.cache
def _valid(kind: str) -> tuple[Path, str]:
    """A valid folder of this kind, kept for the life of the process, and its result."""
    folder = Path(tempfile.mkdtemp(prefix="equipoise-selfcheck-"))
    SUBJECTS[kind].make(folder)
    outcome = opened_apart(kind, folder)
    if outcome.kind != "opened":
        raise EquipoiseError(f"a valid {kind} does not open: {outcome.text}")
    return folder, outcome.text


def kinds() -> list[str]:
    """The subjects whose packages are installed."""
    import importlib.util

    needs = {"onnx": "onnx", "texts": "yaml"}
    return [
        kind
        for kind in SUBJECTS
        if kind not in needs or importlib.util.find_spec(needs[kind]) is not None
    ]


def judge(kind: str, guarded: bool, expected: str, outcome: Outcome) -> str | None:
    """What is wrong with an outcome, or None."""
    if outcome.kind == "failed":
        return outcome.text
    if guarded and SUBJECTS[kind].guarded and outcome.kind == "opened" and outcome.text != expected:
        return f"another result after an accident: {outcome.text[:200]} instead of {expected[:200]}"
    return None


def damaged_files(batch: Batch) -> None:
    """Some cases: a subject, a mutation, an opening."""
    chance = random.Random(batch.integer(0, 2**62))
    for number in range(CASES):
        kind = chance.choice(kinds())
        accident = chance.random() < 0.5
        valid, expected = _valid(kind)
        with tempfile.TemporaryDirectory(prefix="equipoise-case-") as place:
            folder = Path(place) / "case"
            shutil.copytree(valid, folder, symlinks=True)
            change = chance.choice(ACCIDENTS if accident else INTENTS)(chance, folder)
            before = _packed(folder)
            outcome = opened_apart(kind, folder)
        wrong = judge(kind, accident, expected, outcome)
        batch.tally.comparisons += 1
        batch.tally.refused += outcome.kind == "refused"
        if wrong is not None:
            batch.tally.violations += 1
            text = script(kind, before, f"{batch.label}, case {number}: {change}", wrong)
            if len(batch.tally.examples) < 20:
                batch.tally.examples.append(
                    f"{batch.label}, case {number} ({kind}; {change}): {wrong.strip().splitlines()[-1]}\n{text}"
                )


def _packed(folder: Path) -> str:
    """The folder as text; links are kept as links."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            if path.is_symlink():
                archive.writestr(name + ".link-to", os.readlink(path))
            elif path.is_file():
                archive.write(path, name)
    return base64.b64encode(buffer.getvalue()).decode()


def script(kind: str, packed: str, change: str, wrong: str) -> str:
    """A program that unpacks the damaged files and opens them; it prints what is wrong."""
    lines = "\n".join(f"# {line}" for line in f"{change}\n{wrong}".splitlines())
    return f"{lines}\nfrom equipoise_lab.fuzz.files import replay\n\nreplay({kind!r}, {packed!r})\n"


def replay(kind: str, packed: str) -> None:
    """Unpack and open the files of a script in this process: a traceback, an execution or another result shows itself."""
    with tempfile.TemporaryDirectory() as place:
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(packed))) as archive:
            archive.extractall(place)
        for path in Path(place).rglob("*.link-to"):
            path.with_suffix("").symlink_to(path.read_text())
            path.unlink()
        os.chdir(place)
        outcome = opened(kind, Path(place))
        ran = " AND SOMETHING WAS EXECUTED" if Path(CANARY).exists() else ""
        sys.stdout.write(f"{outcome.kind}{ran}: {outcome.text}\n")
        os.chdir("/")
