# SPDX-License-Identifier: Apache-2.0
"""From rollouts with rewards to updated weights."""
