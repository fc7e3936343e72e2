"""Networking that server, HTTP layer and client share: sockets and their peers, quotas, log lines."""
