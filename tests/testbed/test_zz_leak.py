import subprocess, sys, time, signal, os
import pytest
def test_leak_plain():
    subprocess.run([sys.executable, "-c", "from subprocess import *; Popen(['sleep','100'],stdout=DEVNULL,stderr=DEVNULL, start_new_session=True)"], check=True)
def test_leak_ray():
    code = """
import ray, os, time
ray.init(address='local', num_cpus=2, include_dashboard=False)
@ray.remote
class A:
    def f(self): return 1
a=A.remote(); print(ray.get(a.f.remote()), flush=True); time.sleep(100)
"""
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    print(p.stdout.readline()); p.kill(); p.wait()
    from rdt_testbed import processes
    t=time.monotonic()
    while time.monotonic()-t<25:
        l=processes.descendants(); print(round(time.monotonic()-t,1), [processes.describe(x)[:60] for x in l]); 
        if len(l)<=1: break
        time.sleep(1)
