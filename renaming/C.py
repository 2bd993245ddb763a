# after A and B
LSP='''
core/fsdp_none x y
'''
LSP='''
comm/base.py Transport.exchange sendrecv
comm/base.py Transport.apart dup_with_thread
comm/base.py Transport.on_its_own_lane with_own_thread
comm/base.py Transport.on with_thread
comm/base.py Transport.by with_backend
comm/base.py Transport.end_apart close_dups
comm/base.py Transport.ledger stats
comm/base.py Transport.way device_backend
comm/threads.py Meeting Rendezvous
comm/service.py Service RequestServer
comm/service.py Asked PendingRequest
comm/backend.py wide accumulation_dtype
comm/choice.py Wished GivenBackends
comm/choice.py Wishes DeviceBackends
comm/choice.py Wish BackendName
comm/choice.py WISHES BACKEND_NAMES
comm/choice.py beside share_thread
config/schema.py Wish DeviceBackendName
config/schema.py Joined BackendName
comm/ending.py Ending Shutdown
comm/ending.py leave_together exit_all
comm/backend.py Backend.exchange sendrecv
performance/simulation/ledger.py Ledger RankTimes
core/shards.py Shard FsdpSlot
core/shards.py is_sharded is_fsdp
core/method.py Central HoldsModel
core/method.py Method.central model_holder
core/step.py Publishing QuantizedGather
core/step.py Publishing.publish gather
core/step.py Publishing.take_back restore
core/step.py Publishing.forget clear
core/step.py Publishing.publications gather_ops
core/step.py publications gather_ops
core/step.py publisher quantized_gather
core/averager.py Traits.histograms histogram_names
core/traffic.py Message CommOp
core/traffic.py Message.leaving off_host_fraction
core/traffic.py Message.crowded contention
core/traffic.py Message.senders sender_fraction
core/traffic.py Message.hidden overlap_steps
core/traffic.py Sizes ModelLayout
core/traffic.py Vector BucketLayout
engine/held.py Held OptimizerParam
engine/meeting.py Gathering ParamGather
engine/updating.py Updating LocalUpdate
engine/arriving.py Arrivals PendingParams
engine/arriving.py _Arrival _PendingParam
engine/wrapping.py Outermost OuterWrapper
parts/averagers/distance.py Measured WithDistance
parts/averagers/mean.py agree set_to_average
parts/averagers/mean.py Mean.refer_to set_reference
parts/averagers/under_way.py Meeting PendingAverage
parts/averagers/server.py Keeper ServerPart
parts/averagers/server.py Server ParameterServer
parts/averagers/parcel.py Parcel MessageBuffer
parts/averagers/parcel.py Parcel.number weight
parts/averagers/ensemble.py Ensemble ElasticMean
methods/d_psgd.py Neighbours GossipAverage
methods/diloco.py Outer OuterOptimizer
methods/noloco.py InPairs PairOuterStep
methods/ad_psgd.py Pairwise PairAverage
methods/switch.py Turn Switch
methods/switch.py TheirExchange SwitchedGradReduce
methods/switch.py TheirSchedule SwitchedSchedule
methods/switch.py TheirAverager SwitchedAverager
report/trace.py Meeting TraceSync
report/meter.py Meter StepTimer
report/meter.py Reading StepRecord
report/sinks/base.py Sink Logger
report/sinks/base.py SinkRun LoggerRun
report/sinks/outlets.py Outlets LoggerProcesses
train/assembly.py Assembly TrainingSetup
train/loop.py Loop TrainLoop
train/world.py World StaticRun
train/ensemble.py Island ElasticRun
train/ensemble.py Moved Relocated
data/placement.py Placement Assignment
data/partition.py Partition.hand assign
elastic/invitation.py Invitation JoinInfo
elastic/strangers.py Strangers PendingConnections
elastic/whereabouts.py Whereabouts CoordinatorAddress
elastic/chronicle.py Chronicle MembershipLog
elastic/allotment.py Allotment ResourceBudget
elastic/allotment.py Paces StepTimes
elastic/ring.py Door Listener
elastic/register.py Ballot Vote
elastic/reallocation.py Reallocation Rebalancing
elastic/meetings.py Meetings ElasticAverage
cost/ways.py Way LinkClass
performance/planning/choice.py Wishes Limits
cluster/starting/job_file.py Wanted Request
train/subject.py Subject TrainingProfile
train/sending.py Sending ReduceSettings
performance/simulation/course.py Course SimulatedRun
performance/simulation/failures.py Toll Overhead
report/islands.py Story Timeline
'''
TOKENS='''
Transport Communicator
Lane CommThread
lane comm_thread
lanes comm_threads
_lanes _comm_threads
_lane _comm_thread
close_lanes close_comm_threads
lanes_apart dup_threads
on_a_lane on_a_comm_thread
CommStats CommStats
'''
HOVER=[('ledger',r'ledger: (\S*\.)?Ledger\b','stats'),('transport',r'transport: (\S*\.)?Transport\b','comm'),('aside',r'aside: (\S*\.)?Transport\b','control')]
