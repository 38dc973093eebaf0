"""Sampling: `api` has the contract."""

from octavo.pallas_kernels.sample.api import Cuts, Drawn, Sample, Settings
from octavo.pallas_kernels.sample.dispatch import Sampler, choose

__all__ = ["Cuts", "Drawn", "Sample", "Sampler", "Settings", "choose"]
