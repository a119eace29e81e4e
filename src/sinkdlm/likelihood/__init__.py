"""Measure how likely a denoiser finds a text, with error bars. estimators.py has the estimators, scoring.py the forwards."""

from sinkdlm.likelihood.estimates import Estimates
from sinkdlm.likelihood.estimators import ESTIMATORS, Documents, document_likelihood, is_greedy, log_likelihood
from sinkdlm.likelihood.ranking import Adaptive

__all__ = ["ESTIMATORS", "Adaptive", "Documents", "Estimates", "document_likelihood", "is_greedy", "log_likelihood"]
