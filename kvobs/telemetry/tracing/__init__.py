"""Write spans of requests and calls as records; the exporter or the API server exports them."""
