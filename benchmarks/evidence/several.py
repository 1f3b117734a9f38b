# SPDX-License-Identifier: Apache-2.0
"""Several parts in one pool of processes, so that none waits for the end of another.

What is named first begins first, behind what it needs: c brings those runs of part a whose models it evaluates.

python benchmarks/evidence/several.py c a d b f g --testbed short --jobs 14 --minutes 9
"""

from __future__ import annotations

import importlib
import sys

from cells import warm_cells
from pool import PARTS, main

if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word in PARTS]
    if not names and not {"-h", "--help"} & set(sys.argv):
        sys.exit(f"name the parts to run, of {' '.join(PARTS)}.")
    sys.argv = [sys.argv[0], *(word for word in sys.argv[1:] if word not in names)]
    makers = {name: warm_cells if name == "warm" else importlib.import_module(f"part_{name}").cells for name in names}
    main(makers, __doc__)
