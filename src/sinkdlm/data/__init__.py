"""From texts to token shards, and from shards to training rows. Importing it imports nothing: each module is named where used."""
