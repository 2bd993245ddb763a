LSP='''
config/schema.py Config.job parallel
config/schema.py Config.schedule lr_schedule
config/schema.py Config.reallocation rebalance
config/schema.py JobSection ParallelSection
config/schema.py ScheduleSection LrScheduleSection
config/schema.py ReallocationSection RebalanceSection
config/schema.py TransportSection DeviceBackendSection
config/schema.py TransportSection.group intra_group
config/schema.py TransportSection.cross inter_group
comm/choice.py Wished.group intra_group
comm/choice.py Wished.cross inter_group
comm/choice.py Wishes.group intra_group
comm/choice.py Wishes.cross inter_group
config/schema.py JobSection.shard fsdp
config/schema.py JobSection.timeout timeout_s
config/schema.py JobSection.transport device_backend
config/schema.py DataSection.store path
config/schema.py DataSection.batch_size group_batch_size
config/schema.py DataSection.workers num_workers
config/schema.py DataSection.share overlap_share
config/schema.py ModelSection.build name
config/schema.py ModelSection.start init_from
config/schema.py ModelSection.blocks fsdp_units
config/schema.py OptimizerSection.build name
config/schema.py ScheduleSection.build name
config/schema.py ScheduleSection.per interval
config/schema.py ScheduleSection.scaling_follows scale_with
config/schema.py TrainingSection.evaluate_every eval_every_epochs
config/schema.py TrainingSection.evaluation_tokens eval_tokens
config/schema.py TrainingSection.checkpoint_every checkpoint_every_steps
config/schema.py TrainingSection.stop_ahead stop_before_end_s
config/schema.py TrainingSection.time_limit time_limit_s
config/schema.py TrainingSection.tune autotune_steps
config/schema.py TrainingSection.overlap overlap_grad_reduce
config/schema.py TrainingSection.prefetch overlap_param_gather
config/schema.py ReallocationSection.unit resource
config/schema.py ReallocationSection.margin min_gain
config/schema.py ReallocationSection.cost cost_s
config/schema.py RunSection.folder output_dir
config/schema.py RunSection.trace trace_steps
config/schema.py RunSection.sinks loggers
start.py init(transport) device_backend
start.py init(timeout) timeout_s
cli/launch.py launch(restarts) max_restarts
cli/launch.py launch(silence) heartbeat_timeout
cli/launch.py launch(island) replica_group
cli/plan.py plan(meets) sync_rate
cli/plan.py plan(every) sync_every
cli/probe.py probe(idle) offload_dir
'''
SECT={'job':'parallel','schedule':'lr_schedule','reallocation':'rebalance'}
KEYS={'job':{'shard':'fsdp','timeout':'timeout_s','transport':'device_backend'},
'parallel.device_backend':{'group':'intra_group','cross':'inter_group'},
'data':{'store':'path','batch_size':'group_batch_size','workers':'num_workers','share':'overlap_share'},
'model':{'build':'name','start':'init_from','blocks':'fsdp_units'},'optimizer':{'build':'name'},
'schedule':{'build':'name','per':'interval','scaling_follows':'scale_with'},
'training':{'evaluate_every':'eval_every_epochs','evaluation_tokens':'eval_tokens','checkpoint_every':'checkpoint_every_steps','stop_ahead':'stop_before_end_s','time_limit':'time_limit_s','tune':'autotune_steps','bucket_mb':'bucket_cap_mb','overlap':'overlap_grad_reduce','prefetch':'overlap_param_gather'},
'reallocation':{'unit':'resource','margin':'min_gain','cost':'cost_s'},'run':{'folder':'output_dir','trace':'trace_steps','sinks':'loggers'}}
ALL=['seed','job','data','model','optimizer','schedule','method','training','reallocation','run']
import re
def path(sec,key):
    """of dotted section.key(.more)"""
    parts=[sec,*key.split('.')]
    new=[SECT.get(sec,sec)]
    at=sec
    for p in parts[1:]:
        new.append(KEYS.get(at,{}).get(p,p)); at=at+'.'+p
    return '.'.join(new)
DOT=re.compile(r'(?<![\w/.])('+'|'.join(ALL[1:])+r')\.([a-z_]+(?:\.[a-z_]+)*)(?![\w(])')
HEAD=re.compile(r'\[('+'|'.join(ALL[1:])+r')((?:\.\w+)*)\](?: (\w+)\b)?')
TUP=re.compile(r'\("('+'|'.join(ALL[1:])+r')", "(\w+)"')
def known(sec,k): return k in KEYS.get(sec,{})
def toml(f,s):
    # dotted
    def dot(m):
        sec,key=m[1],m[2]
        pre=s[max(0,m.start()-2):m.start()]
        first=key.split('.')[0]
        ok=known(sec,first) or sec in SECT
        if sec in SECT and not known(sec,first) and pre!='--' and first not in ('groups','group_size','backend','scaling','warmup_epochs','arguments','total'): ok=False
        return path(sec,key) if ok else m[0]
    s2=DOT.sub(dot,s); s=s2
    s=TUP.sub(lambda m:'("'+SECT.get(m[1],m[1])+'", "'+KEYS.get(m[1],{}).get(m[2],m[2])+'"',s)
    # sections
    out=[];at=0;sec=None
    tokre=re.compile(HEAD.pattern+r'|(?<![\w.\-"/])(\w+)(?= ?=(?!=))|(```)')
    for m in tokre.finditer(s):
        if m[1]:
            sec=m[1]+m[2]
            head='['+SECT.get(m[1],m[1])+''.join('.'+KEYS.get(m[1],{}).get(x,x) for x in m[2].split('.')[1:])+']'
            w=m[3]
            out.append(s[at:m.start()]+head+((' '+KEYS.get(sec,{}).get(w,w)) if w else '')); at=m.end()
        elif m[4]:
            if sec and m[4] in KEYS.get(sec,{}):
                out.append(s[at:m.start()]+KEYS[sec][m[4]]); at=m.end()
        elif m[5]: sec=None
    out.append(s[at:]); return ''.join(out)
SKIP=re.compile(r'simulat|benchmarks/goodput/|^hpcsgd/config/renamed|test_scenario')
SUBS=[(r'(--)meets\b',r'\1sync-rate'),(r'(--)idle\b',r'\1offload-dir'),(r'(--)silence\b',r'\1heartbeat-timeout'),(r'(--)restarts\b',r'\1max-restarts'),(r'(--)island\b',r'\1replica-group'),
 (r'(hpcsgd probe[^\n`]*?--)every\b',r'\1sync-every'),(r'(hpcsgd plan[^\n`]*?--)every\b',r'\1sync-every'),
 (r'scale_with( ?= ?)"living"',r'scale_with\1"alive"'),
 (r'\btransport=(?=[{\[])','device_backend='),(r'"transport": ?(?=\{)','"device_backend": ')]
ARGS={'transport':'device_backend','timeout':'timeout_s','restarts':'max_restarts','silence':'heartbeat_timeout','island':'replica_group','meets':'sync_rate','every':'sync_every','idle':'offload_dir'}
