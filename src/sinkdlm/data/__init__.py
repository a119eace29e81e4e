"""Turn texts into token shards, and shards into training rows. Importing the package imports none of its modules."""
