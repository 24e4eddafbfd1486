"""Make kvobs's Grafana boards, Prometheus rules and Kubernetes manifests from the table of signals.

``python -m dashboards`` writes everything under ``dashboards/generated``; ``--check`` fails where a file differs.
"""
