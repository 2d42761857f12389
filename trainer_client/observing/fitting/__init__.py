"""Costs fitted to measured compute times."""

from trainer_client.observing.fitting.fitter import CostFitter, FitOptions
from trainer_client.observing.fitting.solve import Fit, fit_times
from trainer_client.observing.fitting.terms import SequenceTerms, Terms

__all__ = ["CostFitter", "Fit", "FitOptions", "SequenceTerms", "Terms", "fit_times"]
