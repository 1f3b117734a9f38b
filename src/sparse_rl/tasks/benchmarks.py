# SPDX-License-Identifier: Apache-2.0
"""Benchmarks by name: what they are, under which licence, how they are graded, and their problems.

Problems come from DATA_DIR/NAME/test.jsonl, else from the package (gsm8k, svamp), else from the Hugging Face hub where
we know the set there. `lookup:pairs=15,keys=words,digits=2` is made on the spot.

How one is put to a model, with which samples and limits, is in evaluate/protocols.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sparse_rl.specs import build, suggestion
from sparse_rl.tasks import benchmark_rows as rows_of
from sparse_rl.tasks.benchmark_rows import Hub, Problem, check_rows, read_lines, renamed, row_check
from sparse_rl.tasks.files import Row
from sparse_rl.tasks.lookup import Lookup

logger = logging.getLogger(__name__)

PACKAGED = Path(__file__).parents[1] / "data"
LOOKUPS = 512  # problems of a generated set, those that a training run holds out
LISTED = 3  # complaints, where there are many
Kind = Literal["maths", "contest", "words", "code", "countdown", "lookup"]
Where = Literal["folder", "package", "generated", "hub", "missing"]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A set of problems.

    Example: BENCHMARKS["aime24"] has kind "contest", 30 rows and the reward "math".
    """

    name: str
    kind: Kind
    rows: int  # as published
    reward: str  # of tasks/rewards.py
    licence: str
    source: str
    restriction: str | None = None
    hub: Hub | None = None
    columns: tuple[str, ...] = ()  # what its reward needs beside the answer
    text: Callable[[Problem], Problem] | None = None  # completes a problem that does not say enough
    caution: str | None = None
    lookup: Lookup | None = None  # how its problems are generated

    def found(self, where: Where, rows: Iterable[Row], path: Path | None = None, wrong: Sequence[str] = ()) -> Found:
        """The rows as they should be, and what is `wrong` with others. Rewards with columns do not read the answer."""
        good, complaints = check_rows(rows, self.columns, row_check(self.reward))
        unanswered = () if self.columns else tuple(row["id"] for row in good if not row["answer"])
        return Found(where=where, path=path, rows=tuple(good), complaints=(*wrong, *complaints), unanswered=unanswered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a benchmark is and what its file holds."""

    where: Where
    path: Path | None = None
    rows: tuple[Problem, ...] = ()
    complaints: tuple[str, ...] = ()  # what is damaged
    unanswered: tuple[str, ...] = ()  # ids of rows that nobody can grade, since their answer is empty


SIMPLERL = "github.com/hkust-nlp/simpleRL-reason"
EVALPLUS = "github.com/evalplus"
MAA = "problems (c) MAA"
RESEARCH = "research only"
UNSTATED = "licence of the problems not stated"
PLUS = ("entry_point", "base_input", "plus_input", "atol")

CATALOGUE = (
    Benchmark("gsm8k", "words", 1319, "math", "MIT", "github.com/openai/grade-school-math"),
    Benchmark(
        "math500", "maths", 500, "math", "MIT", SIMPLERL,
        caution="a part of math/test; simplerl_hard holds 2936 other problems of math/test and none of these, so after "
        "training on it evaluate on math500, never on math/test",
        hub=Hub("HuggingFaceH4/MATH-500", None, "test", renamed(
            "math500-", id="unique_id", problem="problem", answer="answer", level="level", subject="subject")),
    ),
    Benchmark(
        "gaokao2023en", "maths", 385, "math", "MIT (collection)", SIMPLERL, UNSTATED,
        text=rows_of.gaokao_subject,
    ),
    Benchmark(
        "minerva_math", "maths", 272, "math", "CC BY-NC-SA (MIT OpenCourseWare)", SIMPLERL, RESEARCH,
        hub=Hub("math-ai/minervamath", None, "test", renamed("minerva-", problem="question", answer="answer")),
    ),
    Benchmark(
        "olympiadbench", "maths", 675, "math", "MIT (collection)", SIMPLERL, "licence of the problems not checked",
        hub=Hub("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", renamed(
            "olympiadbench-", id="id", problem="question", answer="final_answer", subject="subfield",
            answer_type="answer_type", is_multiple_answer="is_multiple_answer", unit="unit")),
    ),
    Benchmark(
        "aime24", "contest", 30, "math", "MIT (collection)", SIMPLERL, MAA,
        hub=Hub("HuggingFaceH4/aime_2024", None, "train", renamed(
            "aime24-", id="id", problem="problem", answer="answer")),
    ),
    Benchmark(
        "amc23", "contest", 40, "math", "MIT (collection)", SIMPLERL, MAA,
        hub=Hub("math-ai/amc23", None, "test", renamed("amc23-", problem="question", answer="answer")),
    ),
    Benchmark(
        "aime25", "contest", 30, "math", "Apache-2.0 (collection)", "github.com/jianzhnie/LLMEval", MAA,
        hub=Hub("yentinglin/aime_2025", None, "train", renamed("aime25-", problem="problem", answer="answer")),
    ),
    Benchmark(
        "aime26", "contest", 30, "math", "Apache-2.0 (collection)", "github.com/jianzhnie/LLMEval", MAA,
        hub=Hub("MathArena/aime_2026", None, "train", renamed(
            "aime26-", id="problem_idx", problem="problem", answer="answer")),
    ),
    Benchmark(
        "hmmt25_feb", "contest", 30, "math", "CC BY-NC-SA (MathArena)", "github.com/pixas/DECS", RESEARCH,
        hub=Hub("MathArena/hmmt_feb_2025", None, "train", renamed(
            "hmmt25feb-", id="problem_idx", problem="problem", answer="answer")),
    ),
    Benchmark(
        "humaneval", "code", 164, "code", "MIT", "github.com/openai/human-eval", columns=("test", "entry_point"),
        hub=Hub("openai/openai_humaneval", None, "test", renamed(
            "", id="task_id", problem="prompt", answer="canonical_solution", test="test", entry_point="entry_point")),
    ),
    Benchmark("humaneval_plus", "code", 164, "code", "Apache-2.0", f"{EVALPLUS}/humanevalplus_release", columns=PLUS),
    Benchmark(
        "humaneval_plus_mini", "code", 164, "code", "Apache-2.0", f"{EVALPLUS}/humanevalplus_release", columns=PLUS
    ),
    Benchmark(
        "mbpp", "code", 500, "code", "CC BY 4.0", "github.com/google-research/google-research (mbpp)",
        columns=("test_list",), text=rows_of.mbpp_text,
        hub=Hub("google-research-datasets/mbpp", "full", "test", renamed(
            "mbpp-", id="task_id", problem="text", answer="code", test_list="test_list",
            test_setup_code="test_setup_code")),
    ),
    Benchmark("mbpp_plus", "code", 378, "code", "Apache-2.0", f"{EVALPLUS}/mbppplus_release", columns=PLUS),
    Benchmark(
        "livecodebench_v1", "code", 400, "code", "not stated", "github.com/XZC888/MavenCoder",
        "problems of LeetCode, AtCoder and Codeforces", columns=("public_tests",), text=rows_of.livecodebench_text,
        caution="public sample tests only: scores cannot be compared with the leaderboard's",
    ),
    Benchmark("svamp", "words", 300, "math", "MIT", "github.com/arkilpatel/SVAMP"),
    Benchmark("asdiv", "words", 431, "math", "CC BY-NC 4.0", "github.com/chaochun/nlu-asdiv-dataset", RESEARCH),
    Benchmark("multiarith", "words", 120, "math", "MIT (collection)", SIMPLERL, UNSTATED),
    Benchmark("addsub", "words", 79, "math", "MIT (collection)", SIMPLERL, UNSTATED),
    Benchmark("singleeq", "words", 101, "math", "MIT (collection)", SIMPLERL, UNSTATED),
    Benchmark("singleop", "words", 112, "math", "MIT (collection)", SIMPLERL, UNSTATED),
    Benchmark(
        "countdown", "countdown", 2000, "countdown", "Apache-2.0", "github.com/Jiayi-Pan/TinyZero",
        columns=("nums", "target"),
    ),
    Benchmark("lookup", "lookup", LOOKUPS, "right_value", "Apache-2.0", "generated", lookup=Lookup()),
)  # fmt: skip
BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in CATALOGUE}


def find(name: str) -> Benchmark:
    """The benchmark of a name; generated ones may have settings, as in lookup:pairs=15."""
    base, colon, _ = name.partition(":")
    if base not in BENCHMARKS:
        hint = suggestion(base, BENCHMARKS)
        raise ValueError(f"benchmark {name!r} is unknown{hint}; choose one of {', '.join(BENCHMARKS)}.")
    benchmark = BENCHMARKS[base]
    if benchmark.lookup:
        return replace(benchmark, name=name, lookup=build("benchmark", name, {"lookup": Lookup}))
    if colon:
        raise ValueError(f"benchmark {name!r}: {base} takes no settings.")
    return benchmark


def look(benchmark: Benchmark, data_dir: str | Path | None = None) -> Found:
    """Read the benchmark's file, from the folder or else the package; the hub is not asked."""
    if benchmark.lookup:
        return Found(where="generated", rows=tuple(_generate(benchmark.lookup)))
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ValueError(f"the data folder {str(data_dir)!r} is not there; name one that holds NAME/test.jsonl.")
    if data_dir is not None and (path := Path(data_dir) / benchmark.name / "test.jsonl").exists():
        return _read(benchmark, "folder", path)
    if (path := PACKAGED / benchmark.name / "test.jsonl").is_file():
        return _read(benchmark, "package", path)
    return Found(where="missing")


def read_problems(name: str, data_dir: str | Path | None = None) -> tuple[list[Problem], list[str]]:
    """Rows with id, problem, answer, where known level and subject, and the columns that the reward needs.

    Then what is not as published, a sentence part each.
    """
    benchmark = find(name)
    found = look(benchmark, data_dir)
    if found.where == "missing":
        found = _from_hub(benchmark, data_dir)
    if found.complaints:
        where = found.path or f"{name} of the hub"
        raise ValueError(f"{where} is damaged: {'; '.join(shortened(found.complaints))}. Mend it or fetch it again.")
    said = []
    if len(found.rows) != benchmark.rows:
        said.append(f"it has {len(found.rows)} rows here and {benchmark.rows} as published")
    if left_out := found.unanswered:
        ids = ", ".join(shortened(left_out))
        said.append(f"{len(left_out)} rows have no answer and are left out: {ids}")
    for each in said:
        logger.warning("%s: %s.", name, each)
    complete = benchmark.text or (lambda row: row)
    return [complete(row) for row in found.rows if row["id"] not in left_out], said


def shortened(complaints: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = [f"and {len(complaints) - LISTED} more"] if len(complaints) > LISTED else []
    return [*complaints[:LISTED], *more]


def _read(benchmark: Benchmark, where: Literal["folder", "package"], path: Path) -> Found:
    lines, not_rows = read_lines(path)
    return benchmark.found(where, lines, path, not_rows)


def _from_hub(benchmark: Benchmark, data_dir: str | Path | None) -> Found:
    why = "we know no set of the hub with these rows"
    if benchmark.hub:
        try:
            return benchmark.found("hub", benchmark.hub.rows())
        except ValueError as error:
            why = str(error).rstrip(".")
    file = Path(data_dir or "DATA_DIR") / benchmark.name / "test.jsonl"
    looked, then = (f"there is no {file}", "") if data_dir else ("no data folder is given", " and give --data-dir")
    columns = ", ".join(("id", "problem", "answer", *benchmark.columns))
    raise ValueError(
        f"benchmark {benchmark.name} cannot be found: {looked}, the package does not have it, and {why}. "
        f"Write its {benchmark.rows} rows ({columns}; from {benchmark.source}) to {file}{then}."
    )


def _generate(config: Lookup) -> list[Problem]:
    """The look-ups a training run holds out; `subject` says in which fifth of the list the asked pair stands."""
    rows = []
    for number in range(LOOKUPS):
        problem, answer = config.problem(f"held out {number}")
        place = [line.endswith(f" is {answer}.") for line in problem.split("\n")].index(True)
        fifth = f"fifth {5 * place // config.pairs + 1} of the list"
        rows.append({"id": f"lookup-{number}", "problem": problem, "answer": answer, "subject": fifth})
    return rows
