"""Where attention goes in a diffusion model, and what happens when it cannot: capture, metrics, interventions, figures, report."""
