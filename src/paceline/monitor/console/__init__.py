"""What people see while a run goes on: event lines, plain and live console, the workers' own output; imports
records.
"""
