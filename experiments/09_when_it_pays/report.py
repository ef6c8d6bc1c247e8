def of_logs(lines): return {}
def write(rows, folder): pass
