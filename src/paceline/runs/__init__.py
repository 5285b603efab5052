"""One run seen from outside its workers: attempts, restarts after lost workers, and the monitor thread where nobody
supervises; imports `launch` and `monitor`.
"""
