# SPDX-License-Identifier: Apache-2.0
"""`python -m sparse_rl`: the command `sparse-rl`."""

from sparse_rl.cli import main

main()
