"""Estimators with the interface of scikit-learn: arrays in, arrays out."""
