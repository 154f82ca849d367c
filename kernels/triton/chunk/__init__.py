"""The chunk form of the matrix families: decays, delta rules, rank-one corrections."""
