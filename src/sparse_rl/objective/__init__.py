# SPDX-License-Identifier: Apache-2.0
"""Pure functions of rewards and log-probs: advantages, corrections, losses, mismatch. No model, no files."""
