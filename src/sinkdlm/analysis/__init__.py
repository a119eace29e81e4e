"""Measure where attention goes in a diffusion model: capture, metrics, interventions, figures, report."""
