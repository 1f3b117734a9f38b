# SPDX-License-Identifier: Apache-2.0
from sparse_rl.cli import main

main()
