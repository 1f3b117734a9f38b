# SPDX-License-Identifier: Apache-2.0
"""Where prompts come from and what an answer is worth. One task a file, dataset and reward together."""
