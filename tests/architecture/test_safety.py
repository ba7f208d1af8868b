"""What must not be in headrace's code: reading data as code (issue of data that strangers could write), shells, sockets to the world."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from safety import findings, found_in

PACKAGE = Path(__file__).parents[2] / "src" / "headrace"

# (path below src/headrace, what it does all the same): (how often, why)
ALLOWED = {
    ("runtime/wire.py", "pickle.loads"): (2, "a private socket pair with our own children"),
    ("rollout/user_process.py", "pickle.loads"): (2, "pipes with our own children, which run the recipe's code"),
    ("cli/doctor.py", ".Pipe()"): (1, "a pipe with our own child, which tries the machine"),
    ("cli/doctor.py", ".recv()"): (1, "from that child"),
    ("cli/plan.py", ".Pool()"): (1, "our own children, which simulate plans"),
    ("cli/interrupts.py", "builtins.exec"): (1, "of an empty text"),
    ("cli/main.py", "importlib.import_module"): (1, "the command's module, by a name from the parser's own list"),
    ("report/adapters/log.py", "importlib.import_module"): (1, "the logger's module, by a name from the parser's own list"),
    ("recipe.py", "importlib.util.spec_from_file_location"): (1, "the recipe, which is the user's code"),
    ("recipe.py", ".exec_module()"): (1, "the recipe, which is the user's code"),
    ("sandbox_launcher.py", "os.execv"): (1, "the sandboxed program itself"),
}

EVASIONS = [
    *("import pickle\npickle.loads(b'')", "from pickle import loads", "from pickle import loads as parse", "import pickle as p\np.load(f)"),
    *("import pickle as p\nq = p\nr = q.loads\nr(b'')", "from pickle import Unpickler", "import pickle\ngetattr(pickle, 'loads')(b'')"),
    *(
        "import pickle\ngetattr(pickle, name)(b'')",
        "import pickle\npickle.__dict__['loads'](b'')",
        "from pickle import *",
        "import _pickle\n_pickle.loads(b'')",
    ),
    *("import importlib\nimportlib.import_module('pickle').loads(b'')", "__import__('pickle').loads(b'')", "from importlib import import_module as i\ni(name)"),
    *(
        "def read(data, parse=pickle.loads):\n    import pickle",
        "import pickle\nmap(pickle.loads, files)",
        "import pickle\nfor parse in (pickle.loads,): parse(b'')",
    ),
    *(
        "import pickle\nparse, n = pickle.loads, 1",
        "def f():\n    import pickle as a\n    def g(): return a.loads(b'')",
        "import pickle\n(p := pickle).loads(b'')",
    ),
    *("import marshal\nmarshal.loads(b'')", "from marshal import load", "import shelve", "from shelve import open", "import dill", "from dill import loads"),
    *("import cloudpickle", "import joblib", "import yaml\nyaml.load(text)", "from yaml import load", "import yaml as y\ny.unsafe_load(text)"),
    *(
        "eval('1')",
        "exec(text)",
        "compile(text, '', 'exec')",
        "import builtins\nbuiltins.eval('1')",
        "from builtins import exec as run",
        "run = eval\nrun('1')",
    ),
    *("__builtins__.eval('1')", "__builtins__['eval']('1')", "import runpy\nrunpy.run_path(path)", "import code\ncode.interact()"),
    *(
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import numpy as np\nnp.load(path, allow_pickle=flag)",
        "np.load(path, **{'allow_pickle': True})",
    ),
    *("from numpy import load\nload(path, **options)", "import pandas as pd\npd.read_pickle(path)"),
    *(
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path, weights_only=False)",
        "from torch import load\nload(path)",
        "import torch\nload = torch.load\nload(path)",
    ),
    *("import torch\ntorch.load(path, **options)", "from torch import jit\njit.load(path)", "import torch\ntorch.hub.load('a', 'b')", "import torch.hub"),
    *("import torch.distributed as dist\ndist.broadcast_object_list(objects)", "from torch.distributed import all_gather_object as gather"),
    *("from multiprocessing.connection import Connection\ndef main(end: Connection):\n    return end.recv()", "ours.recv()"),
    *("from multiprocessing.connection import Client\nClient(address).recv()", "import multiprocessing.connection as c\nc.Listener(address)"),
    *("import multiprocessing\nmultiprocessing.Manager()", "from multiprocessing import Pool", "from multiprocessing.managers import BaseManager"),
    *("import asyncio\nasyncio.start_server(f, 'h', 1)", "import asyncio\nasyncio.start_unix_server(f, path)", "from asyncio import start_unix_server as s"),
    *(
        "loop.create_server(f)",
        "server.bind(('', 80))",
        "server.listen()",
        "import socket as s\ns.create_server(('', 80))",
        "import http.server",
        "from http import server",
    ),
    *("from http.server import HTTPServer", "import socketserver", "from xmlrpc.server import SimpleXMLRPCServer"),
    *("import subprocess\nsubprocess.getoutput('ls')", "from subprocess import getoutput", "import subprocess as s\ns.run('ls', shell=True)"),
    *(
        "from subprocess import Popen\nPopen('ls', shell=yes)",
        "import subprocess\nsubprocess.run('ls', **options)",
        "import asyncio\nasyncio.create_subprocess_shell('ls')",
    ),
    *(
        "import os\nos.system('ls')",
        "from os import system",
        "from os import popen as p",
        "import os\ngetattr(os, 'system')('ls')",
        "import os as o\no.execvp('a', [])",
    ),
    *("import os\ngetattr(os, name)('ls')", "import os\nos.spawnl(0, 'a')", "import pty\npty.spawn('sh')", "loop.subprocess_shell(f, 'ls')"),
    *("AutoModel.from_pretrained(path, trust_remote_code=True)", "options = {'trust_remote_code': True}", "f(trust_remote_code=trust)"),
    *("from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained(path)", "import transformers as t\nt.AutoConfig.from_pretrained(path)"),
    "from transformers import AutoModelForCausalLM as M\nM.from_pretrained(path, trust_remote_code=False)",
    "from transformers import AutoModelForCausalLM as M\nM.from_pretrained(path, trust_remote_code=False, use_safetensors=None)",
    *("import importlib.util as u\nu.spec_from_file_location('a', path)", "spec.loader.exec_module(module)", "connection.enable_load_extension(True)"),
]

HARMLESS = """
import asyncio, inspect, os, pickle, re, socket, subprocess
import numpy as np
import torch
from transformers import AutoTokenizer
data = pickle.dumps(1, protocol=pickle.HIGHEST_PROTOCOL)
size = len(data.strip())
re.compile("a")
model.eval()
end.recv(4096)
inspect.signature(f).bind(1)
subprocess.run(["ls"], shell=False, check=True)
np.load(path)
np.load(path, allow_pickle=False)
torch.load(path, weights_only=True)
AutoTokenizer.from_pretrained(path, trust_remote_code=False)
socket.socketpair()
os.path.exists(path)
getattr(learner, method)()
asyncio.create_subprocess_exec("ls")
"""


def test_nothing_reads_data_as_code_or_opens_a_port_but_where_a_reason_is_given() -> None:
    assert Counter(findings(PACKAGE)) == {place: times for place, (times, _) in ALLOWED.items()}


@pytest.mark.parametrize("text", EVASIONS)
def test_a_planted_violation_is_found_however_it_is_named(text: str) -> None:
    assert list(found_in(text))


def test_what_is_harmless_is_not_found() -> None:
    assert list(found_in(HARMLESS)) == []


def test_a_second_use_in_a_file_that_has_a_reason_for_one_is_found(tmp_path: Path) -> None:
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli/interrupts.py").write_text("exec('')\nexec(text)", encoding="utf-8")
    place = ("cli/interrupts.py", "builtins.exec")
    assert Counter(findings(tmp_path))[place] == 2 != ALLOWED[place][0]
