# SPDX-License-Identifier: Apache-2.0
"""Wrong programs that try to be judged right: `attack` never returns the answer, "done"."""

from __future__ import annotations

FORGERIES: dict[str, str] = {
    "early exit": r"""
import sys
sys.exit(0)
""",
    "hard exit": r"""
import os
os._exit(0)
""",
    "exit when called": r"""
import os
def attack():
    os._exit(0)
""",
    "SystemExit when called": r"""
def attack():
    raise SystemExit(0)
""",
    "closes everything": r"""
import os
os.closerange(0, 64)
def attack():
    return 'wrong'
""",
    "lying equality": r"""
class Liar(str):
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    __hash__ = str.__hash__
def attack():
    return Liar('wrong')
""",
    "lying object": r"""
class Liar:
    def __eq__(self, other):
        return True
    def __bool__(self):
        return True
def attack():
    return Liar()
""",
    "lying list": r"""
class Liar(list):
    def __eq__(self, other):
        return True
def attack():
    return Liar(['wrong'])
""",
    "lying type": r"""
class Meta(type):
    def __eq__(self, other):
        return True
    __hash__ = type.__hash__
class Liar(metaclass=Meta):
    __eq__ = lambda self, other: True
def attack():
    return Liar
""",
    "patches builtins": r"""
import builtins
builtins.AssertionError = type('E', (BaseException,), {})
builtins.isinstance = lambda *a: True
builtins.all = lambda *a: True
builtins.bool = lambda *a: True
def attack():
    return 'wrong'
""",
    "patches operator": r"""
import operator
operator.eq = lambda *a: True
def attack():
    return 'wrong'
""",
    "patches the comparison": r"""
import sys
for name, module in list(sys.modules.items()):
    for key in ('right', 'same_text', 'encode', 'decode', 'check'):
        if hasattr(module, key):
            setattr(module, key, lambda *a, **k: b'passed')
def attack():
    return 'wrong'
""",
    "loads the checker": r"""
import sys
sys.path.append('/')
import importlib
try:
    import sparse_rl.sandbox.checker as checker
    checker._say('passed', '')
except Exception:
    pass
def attack():
    return 'wrong'
""",
    "looks for it with gc": r"""
import gc
for thing in gc.get_objects():
    if type(thing) is dict and 'expected' in thing:
        thing['expected'] = ['wrong']
def attack():
    return 'wrong'
""",
    "looks for it in frames": r"""
import sys
def attack():
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if isinstance(value, (str, bytes)) and 'done' in str(value) and len(value) < 20:
                return 'do' + 'ne'
        frame = frame.f_back
    return 'wrong'
""",
    "forges the verdict everywhere": r"""
import os, struct
body = b'passed\n'
for fd in range(64):
    for text in (b'\0ready\n' + struct.pack('=I', len(body)) + body, struct.pack('=I', len(body)) + body, body):
        try:
            os.write(fd, text)
        except OSError:
            pass
def attack():
    return 'wrong'
""",
    "an answer that is no answer": r"""
import os, struct
for body in (b'{}', b'["passed"]', b'{"t":5}', b'{"s":[[1]]}', b'\xff', b'{"o":0}'):
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack('=I', len(body)) + body)
        except OSError:
            pass
def attack():
    return 'wrong'
""",
    "raises what ends a test": r"""
def attack():
    raise type('SystemExit', (Exception,), {})('0')
""",
    "raises AssertionError": r"""
def attack():
    raise AssertionError('passed')
""",
    "prints the verdict": r"""
print('passed')
print('done')
def attack():
    print('done')
""",
    "slow collisions": r"""
def attack():
    return {i * ((1 << 61) - 1) for i in range(3000)}
""",
}

# Wrong programs that would rather not be judged: a failure of the grader's is left out of every mean.
EXCUSES: dict[str, str] = {
    "a UUID": "import uuid\ndef attack():\n    return uuid.UUID(int=1)",
    "an array": "import array\ndef attack():\n    return array.array('i', [1])",
    "a path": "import pathlib\ndef attack():\n    return pathlib.Path('wrong')",
    "keys": "def attack():\n    return {'wrong': 1}.keys()",
    "a view of memory": "def attack():\n    return memoryview(b'wrong')",
    "a proxy": "import types\ndef attack():\n    return types.MappingProxyType({'wrong': 1})",
    "a date with a zone": "import datetime\ndef attack():\n    return datetime.datetime.now(datetime.timezone.utc)",
    "a function": "def attack():\n    return attack",
    "a deep list": "def attack():\n    value = 0\n    for _ in range(99):\n        value = [value]\n    return value",
    "a long number": "def attack():\n    return 10 ** 9000",
    "no thing": r"""
import os, struct
def attack():
    for body in (b'["value",{"o":[0,"x"]},null]', b'["value",{"o":0},null]', b'["value",{"o":-9},null]', b'{"o":{}}'):
        for fd in range(3, 64):
            try:
                os.write(fd, struct.pack('=I', len(body)) + body)
            except OSError:
                pass
    os._exit(0)
""",
    "deeper than can be sent back": r"""
import os, struct
def attack():
    body = b'["value",' + b'[' * 150 + b']' * 150 + b',null]'
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack('=I', len(body)) + body)
        except OSError:
            pass
    os._exit(0)
""",
    "another exit": "def attack():\n    raise type('SystemExit', (BaseException,), {})",
}
