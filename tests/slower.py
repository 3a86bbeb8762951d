"""`tests/slower.txt` from the log of a run: `pytest -m "not slow" --durations=0 -vv | python tests/slower.py`.

The list holds the tests that take most of the time, one beginning of a node id per line with its seconds; `make check`
leaves them out (they get the marker `medium`), and a run on several processes starts with the files that have most of
them. A test that is not in it counts as quick.
"""

import collections
import re
import sys
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
#: a row is quick below this many seconds
QUICK = 0.04
LINE = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S.*?)\s*$")


def slower(log):
    """The seconds of functions most of whose rows are slow, and of the slow rows of the others, slowest first."""
    seconds = collections.Counter()
    for line in log:
        if found := LINE.match(line):
            seconds[found[2]] += float(found[1])
    rows = collections.defaultdict(dict)
    for name, took in seconds.items():
        rows[name.partition("[")[0]][name] = took
    kept = {}
    for function, each in rows.items():
        slow = {name: took for name, took in each.items() if took >= QUICK}
        if 2 * len(slow) > len(each):
            kept[function] = sum(each.values())
        else:
            kept |= slow
    return dict(sorted(kept.items(), key=lambda row: -row[1]))


def listed():
    """The list as it is committed: seconds by name."""
    rows = (line.partition(" ") for line in LIST.read_text(encoding="utf-8").splitlines())
    return {name: float(took) for took, _, name in rows}


if __name__ == "__main__":
    LIST.write_text("".join(f"{took:.1f} {name}\n" for name, took in slower(sys.stdin).items()), encoding="utf-8")
