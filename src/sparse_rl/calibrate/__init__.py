# SPDX-License-Identifier: Apache-2.0
"""Which budget a model needs: overlap with the dense model by budget and context length, and the schedule it gives."""

from sparse_rl.calibrate.calibrate import Calibration, CalibrationObserver, calibrate, check_tokens, longest_context
from sparse_rl.calibrate.config import CalibrationConfig

__all__ = ["Calibration", "CalibrationConfig", "CalibrationObserver", "calibrate", "check_tokens", "longest_context"]
