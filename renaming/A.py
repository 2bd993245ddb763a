METHODS='hierarchical allreduce_local_sgd diloco des_loco sparse_loco no_loco sasgd ensemble post_local bsp ssp async_sgd ad_psgd sgp osgp d_psgd adacomm fedavg selsync streamed delayed switch'
KW=[(METHODS,'every','sync_every'),(METHODS,'exchange','grad_reduce'),(METHODS,'moments','optimizer_state'),(METHODS,'average','quantize'),
 ('adacomm','interval','initial_sync_every'),('adacomm','block','adapt_every'),('delayed','steps','sync_delay'),
 ('streamed','delay','sync_delay'),('streamed','fragments','num_fragments'),('streamed','blend','update_alpha'),
 ('osgp','staleness','overlap_steps'),('ssp','staleness','max_staleness'),
 ('des_loco','first','first_every'),('des_loco','second','second_every'),
 ('Method','exchange','grad_reduce'),('Method','when','schedule'),('Method','how','averager'),
 ('sparse_loco','select','selection'),
 ('DistributedOptimizer','accumulate','gradient_accumulation_steps'),('DistributedOptimizer','bucket_mb','bucket_cap_mb'),
 ('DistributedOptimizer','overlap','overlap_grad_reduce'),('DistributedOptimizer','prefetch','overlap_param_gather'),('DistributedOptimizer','master','master_dtype'),
]
def meth(f,fn,*pairs): return ''.join(f'methods/{f}.py {fn}({a}) {b}\n' for a,b in (p.split(':') for p in pairs))
E,M,A,X='every:sync_every','moments:optimizer_state','average:quantize','exchange:grad_reduce'
LSP=(meth('ad_psgd','ad_psgd',X)+meth('adacomm','adacomm','interval:initial_sync_every','block:adapt_every',X,M,A)+meth('async_sgd','async_sgd',X)+meth('bsp','bsp',X)
+meth('d_psgd','d_psgd',X)+meth('delayed','delayed','steps:sync_delay')+meth('des_loco','des_loco',E,'first:first_every','second:second_every',M,X,A)
+meth('diloco','diloco',E,X,M,A)+meth('ensemble','ensemble',E,X)+meth('fedavg','fedavg',X,M)+meth('hierarchical','hierarchical',E,X,M,A)+meth('hierarchical','allreduce_local_sgd',E,M)
+meth('no_loco','no_loco',E,X)+meth('post_local','post_local',E,X,M)+meth('sasgd','sasgd',E,X)+meth('selsync','selsync',X,M)+meth('sgp','sgp',X)+meth('sgp','osgp','staleness:overlap_steps',X)
+meth('sparse_loco','sparse_loco',E,'select:selection',X,M)+meth('ssp','ssp','staleness:max_staleness',X)+meth('streamed','streamed','fragments:num_fragments','delay:sync_delay','blend:update_alpha')
+'''
core/method.py Method.exchange grad_reduce
core/method.py Method.when schedule
core/method.py Method.how averager
engine/plan.py StepPlan.exchange grad_reduce
core/step.py Step StepContext
core/step.py Departure ReduceContext
core/step.py Fixed TrainingContext
core/step.py Exchange GradReduce
core/step.py GroupExchange GroupGradReduce
core/traits.py ExchangeTraits GradReduceTraits
core/step.py Moments OptimizerStateView
core/step.py Step.notes metrics
core/step.py Departure.notes metrics
core/step.py Step.moments optimizer_state
core/step.py Fixed.moments optimizer_state
core/step.py Step.owned shards
core/step.py Fixed.shards updates_shards
engine/optimizer.py DistributedOptimizer.notes metrics
engine/optimizer.py DistributedOptimizer.meet average_models
engine/optimizer.py DistributedOptimizer.averaged averaged_model
engine/optimizer.py DistributedOptimizer(accumulate) gradient_accumulation_steps
engine/optimizer.py DistributedOptimizer(bucket_mb) bucket_cap_mb
engine/optimizer.py DistributedOptimizer(overlap) overlap_grad_reduce
engine/optimizer.py DistributedOptimizer(prefetch) overlap_param_gather
engine/optimizer.py DistributedOptimizer(master) master_dtype
engine/with_gradients.py WithGradients.accumulate set_gradient_accumulation_steps
engine/joined.py Joined ChainedOptimizer
core/flat.py Bucket.own param_shard
core/flat.py Bucket.g_own grad_shard
core/flat.py Bucket.own_of shard_of
core/flat.py Bucket.gradients_own gradients_of_shard
core/flat.py Piece ShardRange
parts/averagers/moments.py kept keep_state
parts/averagers/moments.py Averaged AverageState
parts/averagers/moments.py Reset ResetState
parts/averagers/selection.py PerRun PerBlock
parts/averagers/selection.py OverPositions AcrossShards
parts/exchanges/feedback.py RateInside LrInErrorFeedback
parts/exchanges/packed.py Packed Quantized
parts/exchanges/dense.py Gathered WithAllgather
parts/wires/base.py Wire Quantizer
models/sharded.py shard fully_shard
''')
LSP+='''
methods/streamed.py streamed streaming
methods/ensemble.py ensemble ensemble_sync
core/topology.py Job Topology
core/topology.py Job.P num_groups
core/topology.py Job.K group_size
core/topology.py Job.g group_index
core/topology.py Job.j shard_index
core/topology.py Job.size world_size
core/topology.py Job.group intra_group
core/topology.py Job.cross inter_group
core/topology.py Job.peers replica_groups
core/topology.py Job.has_peers is_elastic
core/topology.py Job.groups total_groups
core/topology.py Job.alone has_one_group
core/topology.py Job.together raise_on_all_ranks
core/topology.py together raise_on_all_ranks
core/topology.py told_by_all gather_or_raise
core/topology.py Peers.number index
core/topology.py Absent.number index
data/placement.py Placement.P num_groups
data/placement.py Placement.K group_size
data/placement.py Placement.g group_index
data/placement.py Placement.j shard_index
data/placement.py AsRank.K group_size
data/placement.py AsRank.P num_groups
data/placement.py AsRank.g group_index
data/placement.py AsRank.j shard_index
'''
TOKENS='''
Peers ReplicaGroups
NOBODY NO_REPLICA_GROUPS
des_loco des_loc
no_loco noloco
sparse_loco sparseloco
'''
HOVER=[('job', r'\bjob: (\S*\.)?(Job|type\[Job\])\b(?!Section)|\bjob: \(self: [^)]*\) -> Job\b', 'topology')]
WORDS='''
des_loco des_loc
no_loco noloco
sparse_loco sparseloco
'''
JM={'P':'num_groups','K':'group_size','g':'group_index','j':'shard_index','size':'world_size','rank':'rank','group':'intra_group','cross':'inter_group','world':'world','mesh':'mesh','together':'raise_on_all_ranks','alone':'has_one_group','peers':'replica_groups','has_peers':'is_elastic','groups':'total_groups'}
PUB={'kept':'keep_state','Averaged':'AverageState','Reset':'ResetState','PerRun':'PerBlock','OverPositions':'AcrossShards','RateInside':'LrInErrorFeedback','Packed':'Quantized','Joined':'ChainedOptimizer','shard':'fully_shard','wires':'quantizers','Job':'Topology','streamed':'streaming','ensemble':'ensemble_sync'}
STRSUBS=[
 (r'\bjob = (hpcsgd\.)?init\(',lambda m:f"topology = {m[1] or ''}init("),
 (r'\bjob\.(P|K|g|j|size|rank|group|cross|world|mesh|together|alone|peers|has_peers)\b(?!\.toml)',lambda m:'topology.'+JM[m[1]]),
 (r'\bJob\.(P|K|g|j|size|rank|group|cross|world|mesh|together|alone|peers|has_peers)\b',lambda m:'Topology.'+JM[m[1]]),
 (r'\b((?:DistributedOptimizer|Sampler|equal_batches|sync_batch_norm|fully_shard|shard|save|load|probe|GradScaler|Injected|Loader|Placement)\([^\n]*?)\bjob\b(?!\.toml)(?! file)',r'\1topology'),
 (r'\bjob=job\b','topology=topology'),
 (r'(?<=hpcsgd\.)('+'|'.join(PUB)+r')\b',lambda m:PUB[m[1]]),
 (r'`Job`','`Topology`'),(r'`(Averaged|Reset|Packed|PerRun|OverPositions|RateInside|Joined)\b',lambda m:'`'+PUB[m[1]]),
 (r'\b(Averaged|Reset|Packed|PerRun|OverPositions|RateInside|Joined)\(',lambda m:PUB[m[1]]+'('),
 (r'`streamed\b','`streaming'),(r'"streamed"','"streaming"'),(r'\bstreamed\(','streaming('),(r'\bstreamed (?=(num_)?fragments=)','streaming '),
 (r'`ensemble`','`ensemble_sync`'),(r'name(\s?[=:]\s?|": )"ensemble"',r'name\1"ensemble_sync"'),(r'\bensemble\(every','ensemble_sync(every'),(r'\bensemble (?=every=)','ensemble_sync '),
 (r'\bevery( ?= ?)(?=[\d{"\'…])',r'sync_every\1'),(r'"every"(?=: )','"sync_every"'),
 (r'--method\.every','--method.sync_every'),(r'--method\.exchange','--method.grad_reduce'),(r'--method\.moments','--method.optimizer_state'),(r'--method\.average','--method.quantize'),
 (r'\bmethod\.(every|exchange|moments|average)\b',lambda m:'method.'+{'every':'sync_every','exchange':'grad_reduce','moments':'optimizer_state','average':'quantize'}[m[1]],r'^(tests|docs|jobs|examples|benchmarks)/'),
 (r'\bmoments( ?= ?|": )(?=["\'{\[])',lambda m:'optimizer_state'+m[1]),
 (r'\baverage( ?= ?|": )(?=["\'{])',lambda m:'quantize'+m[1]),
 (r'\bexchange( ?= ?|": )(?=["\'{\[])',lambda m:'grad_reduce'+m[1]),
 (r'\boptimizer_state( ?= ?|": )"(averaged|reset|kept)"',lambda m:'optimizer_state'+m[1]+'"'+{'averaged':'average','reset':'reset','kept':'keep'}[m[2]]+'"'),
 (r'name( ?= ?|": )"packed"',r'name\1"quantized"'),(r'"over_positions"','"across_shards"'),(r'"per_run"','"per_block"'),(r'"rate_inside"','"lr_in_error_feedback"'),
 (r'(name = "adacomm"[^\n]*?)\binterval =',r'\1initial_sync_every ='),(r'(name = "adacomm"[^\n]*?)\bblock =',r'\1adapt_every ='),(r'(\badacomm [^\n]*?)\binterval=',r'\1initial_sync_every='),(r'(\badacomm [^\n]*?)\bblock=',r'\1adapt_every='),
 (r'(name( ?= ?|": )"delayed"[^\n]*?)\bsteps( ?= ?|": )',r'\1sync_delay\3'),
 (r'(name( ?= ?|": )"streaming"[^\n]*?)\bdelay( ?= ?|": )',r'\1sync_delay\3'),(r'(name( ?= ?|": )"streaming"[^\n]*?)\bfragments( ?= ?|": )',r'\1num_fragments\3'),(r'(name( ?= ?|": )"streaming"[^\n]*?)\bblend( ?= ?|": )',r'\1update_alpha\3'),
 (r'(name( ?= ?|": )"osgp"[^\n]*?)\bstaleness( ?= ?|": )',r'\1overlap_steps\3'),(r'(name( ?= ?|": )"ssp"[^\n]*?)\bstaleness( ?= ?|": )',r'\1max_staleness\3'),
 (r'\bssp staleness=','ssp max_staleness='),(r'\bosgp staleness=','osgp overlap_steps='),
 (r'\boptimizer\.notes\b','optimizer.metrics'),(r'\boptimizer\.meet\(\)','optimizer.average_models()'),(r'\boptimizer\.averaged\(\)','optimizer.averaged_model()'),(r'`averaged\(\)`','`averaged_model()`'),(r'`meet\(\)`','`average_models()`'),(r'\boptimizer\.accumulate\(','optimizer.set_gradient_accumulation_steps('),
 (r'\bmethod\.when\b','method.schedule'),(r'\bmethod\.how\b','method.averager'),
 (r'\b(accumulate|bucket_mb|overlap|prefetch|master)=(?=\d|True|False|None|torch)',lambda m:{'accumulate':'gradient_accumulation_steps','bucket_mb':'bucket_cap_mb','overlap':'overlap_grad_reduce','prefetch':'overlap_param_gather','master':'master_dtype'}[m[1]]+'='),
]
ARGS={'job':'topology','every':'sync_every','exchange':'grad_reduce','moments':'optimizer_state','average':'quantize','interval':'initial_sync_every','block':'adapt_every','steps':'sync_delay','delay':'sync_delay','fragments':'num_fragments','blend':'update_alpha','staleness':'overlap_steps max_staleness','first':'first_every','second':'second_every','when':'schedule','how':'averager','select':'selection','accumulate':'gradient_accumulation_steps','bucket_mb':'bucket_cap_mb','overlap':'overlap_grad_reduce','prefetch':'overlap_param_gather','master':'master_dtype',
'P':'num_groups','K':'group_size','group':'intra_group','cross':'inter_group','peers':'replica_groups'}
MOVES='''
hpcsgd/methods/des_loco.py hpcsgd/methods/des_loc.py
hpcsgd/methods/no_loco.py hpcsgd/methods/noloco.py
hpcsgd/methods/sparse_loco.py hpcsgd/methods/sparseloco.py
hpcsgd/methods/streamed.py hpcsgd/methods/streaming.py
hpcsgd/methods/ensemble.py hpcsgd/methods/ensemble_sync.py
hpcsgd/parts/wires/__init__.py hpcsgd/parts/quantizers/__init__.py
'''
MOVES='\n'.join(f'hpcsgd/methods/{a}.py hpcsgd/methods/{b}.py\ntests/methods/test_{a}.py tests/methods/test_{b}.py\ndocs/training/{a}.png docs/training/{b}.png' for a,b in (('des_loco','des_loc'),('no_loco','noloco'),('sparse_loco','sparseloco'),('streamed','streaming')))
MOVES+='\nhpcsgd/methods/ensemble.py hpcsgd/methods/ensemble_sync.py\n'
MOVES+='\n'.join(f'hpcsgd/parts/wires/{x}.py hpcsgd/parts/quantizers/{x}.py' for x in '__init__ base blocks halves levels mean rounding whole'.split())
MOVES+='\n'+'\n'.join(f'tests/parts/wires/{x}.py tests/parts/quantizers/{x}.py' for x in 'test_formats test_levels test_mean'.split())
SUBS=[(r'\bparts([./])wires\b',r'parts\1quantizers'),(r'\btraining/(des_loc|noloco|sparseloco|streamed)\.png',lambda m:'training/'+{'streamed':'streaming'}.get(m[1],m[1])+'.png'),
 (r'\bmethods([./])streamed\b',r'methods\1streaming'),(r'\bmethods([./])ensemble\b(?!_)',r'methods\1ensemble_sync'),(r'\bwires\.(int8|int4|int2|bf16|fp16|Nearest|Stochastic|Levels)',r'quantizers.\1'),(r'test_streamed\b','test_streaming')]
TOKENS+='''
wires quantizers
WIRES QUANTIZERS
'''
EXCL={'wires':r'^benchmarks/(sharded|step_time|strong_scaling)'}
