"""rewards/code.py against hostile answers: nothing but a right function passes."""

from __future__ import annotations

import os
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest

from minirllm.sandboxes import create
from minirllm.sandboxes.cgroup import MOUNT
from tests.test_code import KINDS, judge

PEEK = """
import gc, glob, os, sys, threading, time
def words():
    found = []
    for path in glob.glob("/proc/[0-9]*"):
        for name in ("environ", "cmdline", "mem", "maps", "fd/0", "fd/1", "stat"):
            try:
                with open(f"{path}/{name}", "rb") as file:
                    if name == "mem":
                        for line in open(f"{path}/maps"):
                            low, high = (int(n, 16) for n in line.split()[0].split("-"))
                            if high - low < 2**26 and " r" in line:
                                file.seek(low); found.append(file.read(high - low))
                    elif not name.startswith("fd"):
                        found.append(file.read(2**16))
            except (OSError, ValueError, OverflowError): pass
    return b"".join(found)
"""
HOSTILE = {
    "leave at once": "import os; os._exit(0)",
    "leave in the call": "import os\ndef add(a, b): os._exit(0)",
    "leave in a thread": (
        "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\ndef add(a, b):\n"
        " import time; time.sleep(5)"
    ),
    "exit in a thread": "import sys, threading\nthreading.Thread(target=sys.exit).start()\ndef add(a, b): return -7",
    "a fake verdict": (
        "print('{\"word\": \"\", \"passed\": 2, \"total\": 2, \"outcome\": \"passed\", \"detail\": \"\"}')"
    ),
    "a fake verdict everywhere": (
        "import os\nfor n in range(64):\n"
        "  try: os.write(n, b'{\"word\": \"x\", \"passed\": 2, \"total\": 2, \"outcome\": \"passed\", "
        "\"detail\": \"\"}\\n')\n  except OSError: 0"
    ),
    "fake replies": (
        "import os\nfor n in range(64):\n  for k in range(9):\n"
        "   try: os.write(n, b'[%d, \"ok\", true, [\"list\", []]]\\n' % k)\n   except OSError: 0"
    ),
    "a forged beginning": (
        "import os\nfor n in range(3, 64):\n"
        "  try: os.write(n, b'[0, \"ok\", [\"dict\", [[\"add\", 1], [\"assert\", 7]]], 5]\\n"
        "[1, \"ok\", [\"held\", {}], 3]\\n')\n  except OSError: 0"
    ),
    "all standard input": "import os, sys\nprint(sys.stdin.read(), os.read(0, 9))\ndef add(a, b): return -7",
    "equal to everything": (
        "class E:\n  def __eq__(self, other): return True\n"
        "  __lt__ = __le__ = __ge__ = __contains__ = __ne__ = __hash__ = __eq__\n"
        "  def __sub__(self, o): return 0\n  def __float__(self): return -7.0\n"
        "  __index__ = __int__ = lambda self: -7\ndef add(a, b): return E()"
    ),
    "an int equal to everything": (
        "class E(int):\n  def __eq__(self, other): return True\n  def __hash__(self): return 3\n"
        "def add(a, b): return E(0)"
    ),
    "a text equal to everything": "class E(str):\n  def __eq__(self, other): return True\ndef add(a, b): return E('x')",
    "its class pretended": (
        "class E:\n  __class__ = property(lambda self: int)\n  def __eq__(self, other): return True\n"
        "  __int__ = __index__ = lambda self: -7\ndef add(a, b): return E()"
    ),
    "no assertions": (
        "import builtins, sys\nclass Quiet(Exception): pass\nbuiltins.AssertionError = Quiet\nsys.flags\n"
        "def add(a, b): return -7"
    ),
    "builtins": (
        "import builtins\n"
        "for name in ('all', 'any', 'abs', 'len', 'isinstance', 'sorted', 'exec', 'compile', 'bool'):\n"
        "  setattr(builtins, name, lambda *a, **k: True)\ndef add(a, b): return -7"
    ),
    "json": "import json\njson.dumps = lambda *a, **k: '[1, \"ok\", -7, null]'\ndef add(a, b): return -7",
    "json of the class": (
        "import json\njson.JSONEncoder.encode = lambda *a, **k: '[0, \"ok\", true, null]'\n"
        "def add(a, b): return -7"
    ),
    "names of the tests": (
        "check = candidate = test_all = lambda *a: True\nassertEqual = print\nclass TestCase: pass\n"
        "__builtins__['len'] = 7\ndef add(a, b): return -7"
    ),
    "skip": "import unittest\ndef add(a, b): raise unittest.SkipTest('all is well')",
    "assertions of its own": "def add(a, b): raise AssertionError",
    "ends quietly": "def add(a, b): raise StopIteration",
    "generator exit": "def add(a, b): raise GeneratorExit",
    "interrupt": "def add(a, b): raise KeyboardInterrupt",
    "frames": (
        "import sys, gc\ndef add(a, b):\n  f = sys._getframe()\n  while f:\n"
        "    for k, v in list(f.f_locals.items()) + list(f.f_globals.items()):\n"
        "      if k in ('expected', 'word', 'wanted'): return v\n    f = f.f_back\n"
        "  return [o for o in gc.get_objects() if isinstance(o, dict) and 'word' in o][:1]"
    ),
    "kill": "import os, signal\ndef add(a, b):\n  os.kill(-1, signal.SIGKILL)",
    "kill its parent": "import os, signal\ndef add(a, b):\n  os.kill(os.getppid(), signal.SIGKILL)\n  return 0",
    "fork and answer twice": "import os\ndef add(a, b):\n  os.fork()\n  return 0",
    "fork bomb": "import os\ndef add(a, b):\n  while True: os.fork()",
    "delete everything": (
        "import shutil\n"
        "for place in ('/work', '/tmp', '/home', '/usr', '/'): shutil.rmtree(place, ignore_errors=True)\n"
        "def add(a, b): return -7"
    ),
    "files for later": (
        "import os\nfor name in ('json', 'unittest', 'sitecustomize', 'usercustomize', 'socket'):\n"
        "  for place in ('/work', '/home/agent', '/tmp'):\n"
        "    open(f'{place}/{name}.py', 'w').write('import os; os._exit(0)')\ndef add(a, b): return -7"
    ),
    "a flood of errors": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "a tower": "def add(a, b):\n  x = []\n  for n in range(100000): x = [x]\n  return x",
    "a loop": "def add(a, b):\n  x = []; x.append(x); return x",
    "a huge number": "import sys; sys.set_int_max_str_digits(0)\ndef add(a, b): return 10**20000",
    "no descriptors": "import os\nos.closerange(0, 100)\ndef add(a, b): return -7",
    "trace": (
        "import sys\n"
        "sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None); sys.excepthook = lambda *a: "
        "os._exit(0)\ndef add(a, b): return -7"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", HOSTILE)
async def test_no_trick_passes(temporary: Path, kind: str, what: str) -> None:
    verdict = await judge(HOSTILE[what], KINDS[kind], timeout=5.0)
    assert (verdict.reward, verdict.is_correct) == (0.0, False), verdict
    assert verdict.metadata["passed"] == 0
    assert groups(temporary) == []


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sandboxes of this test lie in a folder of their own, after which their control groups are called."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def groups(temporary: Path) -> list[Path]:
    """The control groups of this test's sandboxes: a process that is left keeps its group."""
    name = sha256(str(temporary / f"minirllm-sandboxes-{os.geteuid()}").encode()).hexdigest()[:8]
    return [path for at in ("", "pids/", "memory/") for path in MOUNT.glob(f"{at}minirllm/{name}-*")]


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups need root")
async def test_a_sandbox_that_runs_has_groups(temporary: Path) -> None:
    async with create("local"):
        assert groups(temporary) != []
    assert groups(temporary) == []


async def test_the_word_and_the_tests_are_nowhere_to_be_read() -> None:
    """Two marks: one stands in the candidate's own memory and must be found, one in the tests'."""
    mine, theirs = "OWN-" + "MARK-7", "TESTS-" + "MARK-8"
    answer = (
        PEEK
        + f"own = {mine!r}\ndef add(a, b):\n    seen = words()\n"
        + f"    return [{mine!r}.encode() in seen, seen.count(bytes.fromhex({theirs.encode().hex()!r}))]"
    )
    tests = f"marked = {theirs!r}\nfound = add(1, 2)\nassert found == [True, 0], found"
    assert (await judge(answer, {"tests": tests})).reason == ""


async def test_a_candidate_cannot_read_what_stands_behind_an_operator() -> None:
    """Only calls, attributes, items, length, iteration and text of an object reach the candidate's process."""
    answer = """
class Thing:
    def __init__(self): self.size = 2
    def __eq__(self, other): return True
    def __contains__(self, other): return True
    def __len__(self): return 2
    def __iter__(self): return iter([1, 2])
    def __getitem__(self, key): return key * 2
    def __str__(self): return "a thing"
    def grow(self, by=1): self.size += by; return self
def make(): return Thing()"""
    tests = """
thing = make()
assert (len(thing), list(thing), thing[4], str(thing), thing.size) == (2, [1, 2], 8, "a thing", 2)
assert thing.grow(by=3).size == 5 and Thing().size == 2
assert thing != make() and thing == thing and not thing == 5 and 7 not in thing and 1 in thing
for wrong in (lambda: thing < 3, lambda: thing + 1, lambda: abs(thing), lambda: float(thing), lambda: thing.absent):
    try: wrong()
    except (TypeError, AttributeError): continue
    assert False"""
    assert (await judge(answer, {"tests": tests})).reason == ""
