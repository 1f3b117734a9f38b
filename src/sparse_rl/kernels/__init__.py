# SPDX-License-Identifier: Apache-2.0
"""What a step computes with: a specification in plain torch (`*_ref`), and the same in Triton for a GPU, if it pays."""
