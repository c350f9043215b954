import sys, time, torch, statistics
sys.path.insert(0,"kernels"); sys.path.insert(0,"tests"); sys.path.insert(0,"eval")
import test_prefill, bench_kernels as bk
from bie_kernels import prefill, tuning, decode_gluon, decode
from bie_kernels.layout import PageLayout
from concurrent.futures import ThreadPoolExecutor
T=tuning.PrefillTile
def attempt(f):
    try: f(); return "ok"
    except AssertionError as e: return "WRONG "+str(e)[:60]
    except Exception as e: return type(e).__name__+str(e)[:80]
if "g32" in sys.argv:
    for t in (T(128,8,1),T(64,4,1),T(64,2,1),T(32,2,1)):
        prefill.prefill_tile=lambda l,d:t
        print("g32", t, attempt(lambda: test_prefill.check([(0,70),(261,9)],PageLayout(64,group_size=32),heads=1)), flush=True)
if "tiles" in sys.argv:
    for t in (T(128,8,1),T(64,4,1),T(128,4,1),T(128,8,2),T(64,4,2)):
        prefill.prefill_tile=lambda l,d:t
        print("tile", t, attempt(lambda: test_prefill.check([(0,70),(700,300)],PageLayout(128),heads=1,group=4)), flush=True)
        try:
            for r in bk.prefill_records(torch.bfloat16)[1:2]: pass
        except Exception as e: print(str(e)[:100])
if "gluon" in sys.argv:
    C=bk.suites(); dt=torch.bfloat16
    layout=PageLayout(128); pool=bk.Pool(layout,8,32768,dt)
    for ex in (True,False):
        for st in (2,3):
            decode_gluon.EXACT_KEYS=ex; decode_gluon.STAGES=st
            row=[]
            for c in C["decode"][:5]+C["ragged"]+C["verify"][:1]:
                tm=bk.decode_timer(c,pool,dt,True)
                for _ in range(9): tm.sample()
                row.append(f"{c.name}: {tm.us:.1f}")
            print("exact",ex,"stages",st," | ".join(row), flush=True)
