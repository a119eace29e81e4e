"""Models behind an API. engine.py denoises requests together, served.py turns texts into them, app.py speaks HTTP."""
