# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face module that both the sampler and the learner run."""
