"""Traces: spans of OpenTelemetry, of each request and of the work that it makes."""
