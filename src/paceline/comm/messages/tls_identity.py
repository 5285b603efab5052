"""The certificate that TLS wants to see: it authenticates nobody, and its key is no secret.

TLS's fast key exchange (ephemeral, over an elliptic curve) exists only with a certificate. Between the hosts of a job
the token is what proves, by the channel binding of each connection (`paceline.comm.messages.secure_socket`); a
certificate has nothing to add. So this one is the same for everybody. Who knows its key, and everybody does, can be a
relay, which the binding finds out; it does not decrypt what others send, since each connection draws keys of its own.
"""

from __future__ import annotations

__all__ = ["CERTIFICATE", "PUBLIC_KEY_PAIR"]

PUBLIC_KEY_PAIR = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgGB0RH5NBjmvtNWfX
HjEW/v4mNglonMvUWI6ZvRm2YzahRANCAAQeHOoLUlnUwiloS9i7Nw96exc2N32R
GfPvVEHLGxnjwkJzG5AhVy33WVRqn2g5i60knRt4jdF9BQS3K8SIojit
-----END PRIVATE KEY-----
"""

CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBlzCCAT6gAwIBAgIBATAKBggqhkjOPQQDAjAqMSgwJgYDVQQDDB9wYWNlbGlu
ZSAoYXV0aGVudGljYXRlcyBub2JvZHkpMCAXDTI2MTEyNzAwNTEyOVoYDzIxMjYx
MTAzMDA1MTI5WjAqMSgwJgYDVQQDDB9wYWNlbGluZSAoYXV0aGVudGljYXRlcyBu
b2JvZHkpMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEHhzqC1JZ1MIpaEvYuzcP
ensXNjd9kRnz71RByxsZ48JCcxuQIVct91lUap9oOYutJJ0beI3RfQUEtyvEiKI4
raNTMFEwHQYDVR0OBBYEFPneyFbGmMp42dQf7o3Pnpvwu/a9MB8GA1UdIwQYMBaA
FPneyFbGmMp42dQf7o3Pnpvwu/a9MA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0E
AwIDRwAwRAIgEGn3Az9WYP+LIyLUvs94l2up0Vmf/a0WAFss5vK/CPsCICY2j9xL
9DP/C0xDMbL8/Js5LzW6yih8UJwigq6OJ0Fm
-----END CERTIFICATE-----
"""
