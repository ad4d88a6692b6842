"""Trees: LightGBM, XGBoost and CatBoost, from the files that they write, over columns."""
