"""How the same model runs fast. The only room that asks about gradients, autocast, device and compiler."""
