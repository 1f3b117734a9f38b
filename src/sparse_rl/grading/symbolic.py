# SPDX-License-Identifier: Apache-2.0
"""Whether two formulas are the same one: parsed by latex2sympy, compared by math-verify, with guards around both.

Decimals are taken exactly as written, so 0.333 is never 1/3. A formula whose value has more digits than anyone writes
out (9^{9^{9}}) is not evaluated: it equals nothing but itself. What this leaves open is time: callers bound it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

LONGEST = 1000  # characters of a formula that is parsed
DEEPEST = 15  # nested brackets
MOST_DIGITS = 20_000.0
# Texts that no person writes and that keep the parser busy: powers of powers of powers, many bars
HOSTILE = re.compile(r"(?:\^[{(\s+-]*(?:\d+|\\[A-Za-z]+|[A-Za-z])[)}\s]*){3}|(?:\|[^|]*){9}")
# 5 6 and {5}{6}, which the parser adds up, and 2^3^2, which may be 64 or 512
DOUBTFUL = re.compile(r"(?<![_\d])\d+\s+\d|(?<![A-Za-z_^}\]])\{\s*\d+\s*\}\s*\{?\s*\d|\^\s*(?:\w|\{[^{}]*\})\s*\^")
NAMED = re.compile(r"\\(angle|triangle|square|odot|widehat|overparen)\s*\{?((?:[A-Z](?:_\{?\d\}?)?\s*){2,})\}?")
# The parser transposes whatever stands before ^T, and a letter transposed is the letter.
TRANSPOSED = re.compile(r"(?<!matrix\})(?<!matrix\}[\])])\s*\^\s*(?:(?:T|\\top)(?![A-Za-z])|\{\s*(?:T|\\top)\s*\})")


def formulas_equal(given: str, right: str) -> bool:
    """Whether the two always have the same value."""
    left, other = parsed(right), parsed(given)
    return left is not None and other is not None and _undone(other) <= _undone(left) and _verify(left, other)


def multiples(given: tuple[str, str], right: tuple[str, str], positive: bool = False) -> bool:
    """Whether (a - b) is a number times (c - d): the same equation; with `positive`, the same inequality."""
    import sympy

    sides = [parsed(side) for side in (*given, *right)]
    if not all(isinstance(side, sympy.Expr) for side in sides) or any(map(_undone, sides[:2])) > any(
        map(_undone, sides[2:])
    ):
        return False
    first, second = sympy.expand(sides[0] - sides[1]), sympy.expand(sides[2] - sides[3])
    if first == 0 or second == 0 or first.free_symbols != second.free_symbols:
        return False
    ratio = sympy.simplify(first / second)
    return bool(ratio.is_number and ratio.is_nonzero and (ratio.is_positive or not positive))


def value(text: str) -> float | None:
    """The real number that a formula without variables comes to, None for anything else."""
    from sympy import Expr

    formula = parsed(text)
    if not isinstance(formula, Expr) or formula.free_symbols or _undone(formula):
        return None
    number = formula.evalf(20)
    return float(number) if number.is_Float or number.is_Rational else None


def readable(text: str) -> str:
    """As the parser wants it: 5% as a fraction, 2e5 as no multiple of e, gamma as no function, A^T as a power."""
    text = re.sub(r"(\d+(?:\.\d+)?) ?%", r"\\frac{\1}{100}", text)
    text = re.sub(r"(?<![A-Za-z])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\d.])", r"\1 \\cdot 10^{\2}", text)
    text = re.sub(r"(?<![A-Za-z\\])E_(\{[^{}]*\}|\w)", lambda match: f"\\Xi_{{E{match[1].strip('{}')}}}", text)
    text = TRANSPOSED.sub("^{(T)}", text)
    text = NAMED.sub(lambda match: f"\\text{{{match[1]}{re.sub(r'[^A-Z0-9]', '', match[2])}}}", text)
    return re.sub(r"\\gamma(?![A-Za-z])", r"\\text{gamma}", text)


@lru_cache(maxsize=256)
def parsed(text: str) -> Any:
    """The sympy formula of a normalised text, None where it cannot be one."""
    if not text or len(text) > LONGEST or HOSTILE.search(text) or DOUBTFUL.search(text) or _depth(text) > DEEPEST:
        return None
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    try:
        # A word in \text is one symbol; letters side by side are a product.
        formula = latex2sympy(
            readable(text), normalization_config=None, conversion_config=ConversionConfig(lowercase_symbols=False)
        )
        return evaluated(formula)
    except MemoryError:
        raise
    except Exception:  # the parser raises all sorts; what it cannot read is no formula
        return None


def evaluated(formula: Any) -> Any:
    """With its arithmetic done exactly, from the inside out: the parser leaves 1/2/2 as it stands.

    Raises OverflowError before a number gets more digits than anyone writes.
    """
    from sympy import Derivative, Expr, Float, I, MatrixBase, MatrixExpr, Rational, Set, Symbol, Tuple, UnevaluatedExpr

    if isinstance(formula, Float):
        return Rational(str(formula))
    if isinstance(formula, Derivative):  # dx/dt is a name: worked out, with x a constant, it would be 0
        return Symbol(str(formula))
    if isinstance(formula, Symbol):
        return I if formula.name == "i" else formula
    if isinstance(formula, MatrixBase):
        return formula.applyfunc(evaluated)
    if not isinstance(formula, Expr | Set | Tuple):
        raise TypeError(f"{type(formula).__name__} is no value")
    if not formula.args:
        return formula
    args = [evaluated(argument) for argument in formula.args]
    if isinstance(formula, UnevaluatedExpr):
        return args[0]
    if digits(formula.func, args) > MOST_DIGITS:
        raise OverflowError("too many digits")
    done = formula.func(*args)
    return done.doit() if isinstance(done, MatrixExpr) else done  # a product of matrices, say


def digits(function: Any, args: list[Any]) -> float:
    """About how many digits a power, a factorial or a binomial of these has, if it is a number; else 0."""
    from sympy import Pow, Rational, binomial, factorial, factorial2

    if not issubclass(function, Pow | binomial | factorial | factorial2) or not args[-1].is_number:
        return 0.0
    sizes = [float(abs(argument).evalf(5)) if argument.is_number else 1.0 for argument in args]
    if function is Pow:
        base = args[0]
        length = max(base.p.bit_length(), base.q.bit_length()) * 0.302 if isinstance(base, Rational) else 1.0
        return sizes[1] * length
    return min(sizes) * len(str(int(sizes[0])))


def _undone(formula: Any) -> bool:
    """Whether a sum, product, integral or limit is left to do: no answer, unless the right one leaves it too."""
    from sympy import Integral, Limit, Product, Sum

    return bool(formula.has(Sum, Product, Integral, Limit))


def _verify(right: Any, given: Any) -> bool:
    from math_verify.grader import verify
    from sympy import Abs, MatrixBase, Symbol, expand_log, log

    if isinstance(right, Symbol) or isinstance(given, Symbol):
        return bool(right == given)  # math-verify takes a product of letters for a word
    if isinstance(right, MatrixBase) != isinstance(given, MatrixBase):
        return False
    if isinstance(right, MatrixBase):
        return right.shape == given.shape and all(map(_verify, right.flat(), given.flat()))
    if right == given:
        return True
    differ = _differ(right, given)
    if not differ and not right.free_symbols | given.free_symbols:
        return differ is False
    if right.has(log) and given.has(log) and not right.has(Abs) and not given.has(Abs):  # their arguments are positive
        right, given = expand_log(right, force=True), expand_log(given, force=True)
    return not differ and bool(verify(right, given, timeout_seconds=None))


def _differ(right: Any, given: Any) -> bool | None:
    """Whether the two differ at some point, to a hundred digits of their difference; None where that has no value."""
    from sympy import Rational

    names = sorted(right.free_symbols | given.free_symbols, key=str)
    for first in (7, 16):
        point = {name: Rational(first * 13 + 5 * k * k + 2 * k, 97 + k) for k, name in enumerate(names)}
        try:
            difference = (right - given).subs(point).evalf(15, maxn=400)
            parts = difference.as_real_imag()
        except (TypeError, ValueError, ArithmeticError, AttributeError):  # no number, as of f(x)
            return None
        if not all(part.is_Float or part.is_Rational for part in parts):
            return None
        # A difference that stays within its own error is left with a precision of 1 bit.
        if any(part != 0 and getattr(part, "_prec", 53) > 1 for part in parts):
            return True
    return False


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest
