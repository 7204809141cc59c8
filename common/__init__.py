"""values: what every process of haulier shares. Knows neither the broker's rules nor the worker's engine."""
