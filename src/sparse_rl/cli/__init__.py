# SPDX-License-Identifier: Apache-2.0
"""The command `sparse-rl`: one subcommand is one file with a function `run`, imported when it is called.

Flags that several of them share are in `parsing.py`.
"""

from __future__ import annotations

import importlib
import os
import sys

COMMANDS = {
    "train": "train a model on a task; without a setting, the embedded model on the embedded task",
    "sft": "teach a model completions to imitate, so that training has something to reward",
    "plan": "what a training run holds in memory, whether it fits, and what to change if it does not",
    "calibrate": "the cheapest KV budget by context length that keeps a model near its dense self, and what it saves",
    "generate": "sample from a model whose KV cache is compressed while it decodes",
    "eval": "accuracy of models on benchmarks, dense and compressed caches side by side",
    "report": "one HTML page with plots and tables of one or several runs",
    "inspect": "which positions caches keep of one text, and how far that takes them from the dense model",
    "export": "a checkpoint as a plain Hugging Face model, adapters merged",
    "bench": "how fast rollouts and updates are, against the hardware and against others",
    "data": "which benchmarks are at hand, what their licences restrict, and how to get the others",
    "env": "versions, GPUs and what else a bug report needs",
}

RESUMED = "; what had finished is kept, and the same command with --resume goes on with it"
KEPT = {"generate": "; what had finished was written", "calibrate": RESUMED, "eval": RESUMED}  # of an interrupted one

USAGE = f"""usage: sparse-rl COMMAND ...

Reinforcement learning of language models whose rollouts run on a sparse KV cache.

commands:
{chr(10).join(f"  {name:<9}  {what}" for name, what in COMMANDS.items())}

`sparse-rl COMMAND --help` lists the settings of a command.
"""


def main(arguments: list[str] | None = None) -> None:
    """Run the command and leave with its exit code: 0, 2 for what the user can mend, 1 otherwise."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        from sparse_rl import __version__

        print(f"sparse-rl {__version__}")
        sys.exit(0)
    if arguments[0] not in COMMANDS:
        from sparse_rl.specs import suggestion

        hint = suggestion(arguments[0], COMMANDS)
        fail(f"unknown command {arguments[0]!r}{hint}; the commands are {', '.join(COMMANDS)}.")
    try:
        importlib.import_module(f"sparse_rl.cli.{arguments[0]}").run(arguments[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader had enough; leave without a word, and without Python's own at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}; check the path." if error.filename else str(error))
    except ValueError as error:
        fail(" ".join(str(error).split()))
    except FloatingPointError as error:
        fail(str(error), code=1)
    except (RuntimeError, MemoryError) as error:
        from sparse_rl.rollout.memory import out_of_memory
        from sparse_rl.specs import first_line

        if not out_of_memory(error):
            raise
        fail(f"out of memory ({first_line(error)}); ask for fewer engine.rows, samples, tokens or pages.")
    except KeyboardInterrupt:
        fail(f"interrupted{KEPT.get(arguments[0], '')}.", code=130)


def fail(message: str, code: int = 2) -> None:
    from sparse_rl.specs import shortened

    rank = os.environ.get("RANK", "0")  # torchrun's
    who = "" if rank == "0" else f"process {rank}: "
    print(f"sparse-rl: error: {who}{shortened(message)}", file=sys.stderr)
    sys.exit(code)
